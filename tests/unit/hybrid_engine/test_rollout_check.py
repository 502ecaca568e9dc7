"""The check at the start of a PPO stage: passes on what is right, stops what is not."""

import math
import time

import pytest
import torch
import transformers as tf

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import HybridEngine, SamplingParams
from rlhf_app.hybrid_engine.decode_state import POSITION, DecodeState
from rlhf_app.hybrid_engine.decode_step import DecodeStep
from rlhf_app.hybrid_engine.fused.compiled import AUTO_TOKENS, find_compiler
from rlhf_app.hybrid_engine.fused.compiled_decoder import CompiledDecoder
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.rollout_check import RolloutMismatch, answer, check_rollouts, compare
from rlhf_app.hybrid_engine.training_scores import Answered, training_logprobs
from rlhf_app.training.distributed import Dist

ALONE = Dist(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


class _Engine:
    """Stands where DeepSpeed's engine stands."""

    module_forward_pre_hook = None
    module_forward_post_hook = None

    def __init__(self, module):
        self.module = module

    def train(self):
        self.module.train()

    def eval(self):
        self.module.eval()

    def zero_optimization_stage(self):
        return 0

    def __call__(self, **inputs):
        return self.module(**inputs)


def engine_of(model):
    engine = HybridEngine(_Engine(model), HybridEngineSettings())
    engine.generator.capability  # noqa: B018 - the probe: what follows gets past it
    return engine


@pytest.fixture
def wrong_positions(monkeypatch):
    """Rows start one position late: rotary and learned positions, and the cache, are off."""
    admit = DecodeState.admit

    def shifted(self, first, requests, slots, lengths):
        state = admit(self, first, requests, slots, lengths)
        state[POSITION] += 1
        return state

    monkeypatch.setattr(DecodeState, "admit", shifted)


@pytest.fixture
def wrong_cache(monkeypatch):
    """One layer's keys are those of another row."""
    run = DecodeStep._run

    def shifted(self, rows, longest, equal):
        keys = self._workspace.keys[1]
        keys[:rows] = keys[:rows].roll(1, 0)
        return run(self, rows, longest, equal)

    monkeypatch.setattr(DecodeStep, "_run", shifted)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
@pytest.mark.parametrize("training", [True, False])
def test_a_right_engine_passes_and_keeps_its_mode(family, training, build, prompts):
    engine = engine_of(build(family))
    engine.train(training)
    numbers = check_rollouts(engine, prompts, SamplingParams(8, stop_ids=(2,)), ALONE)
    assert engine.module.training is training
    assert 0 < numbers["mean"] <= numbers["max"] < 1e-4
    assert 12 <= numbers["tokens"] <= 96  # 4 prompts; greedy, sampled, and sampled with stops
    assert numbers["missed"] < 0.01  # fp32


def test_it_takes_less_than_a_second(build, prompts):
    engine = engine_of(build("llama"))
    start = time.process_time()
    check_rollouts(engine, prompts, SamplingParams(256), ALONE)
    assert time.process_time() - start < 3.0  # about .3 on two quiet cores


@pytest.mark.parametrize("fault", ["wrong_positions", "wrong_cache"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complaint_dsc1_an_engine_that_decodes_wrongly_is_caught(
    fault, dtype, build, prompts, request
):
    """Repeats and gibberish with the engine on: found before training, with the way out."""
    engine = engine_of(build("llama").to(dtype))
    check_rollouts(engine, prompts, SamplingParams(8), ALONE)
    request.getfixturevalue(fault)
    with pytest.raises(RolloutMismatch, match=r"hybrid_engine\.enabled: false"):
        check_rollouts(engine, prompts, SamplingParams(8), ALONE)


@pytest.mark.parametrize("fault", ["wrong_positions", "wrong_cache"])
def test_an_untrained_model_hides_no_error(fault, prompts, request):
    """Its log-probs hardly depend on the prompt: a wrong one is off by a thousandth of a nat."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    engine = engine_of(tf.LlamaForCausalLM(config))
    check_rollouts(engine, prompts, SamplingParams(8), ALONE)
    request.getfixturevalue(fault)
    with pytest.raises(RolloutMismatch):
        check_rollouts(engine, prompts, SamplingParams(8), ALONE)


def test_a_rollout_of_another_distribution_is_caught(build, prompts, monkeypatch):
    """The rollout forgets the temperature."""
    from rlhf_app.hybrid_engine.sampling import Sampler

    engine = engine_of(build("llama"))
    params = SamplingParams(8, temperature=0.7)
    check_rollouts(engine, prompts, params, ALONE)
    engine = engine_of(build("llama"))
    monkeypatch.setattr(Sampler, "filtered", lambda self, logits: logits.float())
    with pytest.raises(RolloutMismatch):
        check_rollouts(engine, prompts, params, ALONE)


def test_training_logprobs_are_those_of_a_plain_forward(build):
    """By hand: one row at a time, no padding, suppressed tokens left out."""
    model = build("gpt2")
    prompts, answers = [[5], [7, 8, 9]], [[3, 4], [11]]
    params = SamplingParams(2, temperature=0.5, suppress_ids=(2, 30))
    got = training_logprobs(model, Answered(prompts, answers, [], params, []))
    for prompt, tokens, logprobs in zip(prompts, answers, got, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0].double() / 0.5
        kept = [i for i in range(logits.shape[1]) if i not in (2, 30)]
        for t, token in enumerate(tokens):
            row = logits[len(prompt) - 1 + t]
            want = row[token] - row[kept].logsumexp(0)
            assert logprobs[t].item() == pytest.approx(want.item(), abs=1e-5)


def test_entries_that_are_no_tokens_do_not_tighten_the_bound(build, prompts, monkeypatch):
    """Logits of -inf, as models with a padded vocabulary give them."""
    plain, padded = build("llama"), build("llama")
    forward = type(padded).forward

    def masked(*arguments, **named):
        output = forward(padded, *arguments, **named)
        output.logits[..., 90:] = -math.inf
        return output

    padded.forward = masked
    bounds = []
    for model in (plain, padded):
        engine = engine_of(model)
        gap, _ = compare(engine, [answer(engine, prompts[:4], SamplingParams(8))], ALONE)
        assert gap.ok
        bounds.append(gap.mean_bound)
    assert bounds[1] == pytest.approx(bounds[0], rel=0.2)


def test_a_sharp_model_is_judged_by_its_own_noise(build, prompts):
    """Rounding that two training forwards show themselves is no error of the rollout."""
    engine = engine_of(build("llama").to(torch.bfloat16))
    engine.train()
    rows = prompts[:4]
    gap, _ = compare(engine, [answer(engine, rows, SamplingParams(8))], ALONE, floor=True)
    assert gap.ok
    assert gap.tokens == 32
    assert gap.max_bound >= 8 * gap.floor_max
    assert gap.mean_bound >= 4 * gap.floor_mean


def test_what_is_not_finite_is_an_error(build, prompts):
    """Of the rollout alone; then of the weights, where nothing is left to compare."""
    model = build("llama")
    engine = engine_of(model)
    rows = [[5, 6], [7]]
    rollout = engine.rollout(rows, SamplingParams(4))
    nan = [torch.full_like(row, math.nan) for row in rollout.logprobs]
    broken = Answered(rows, rollout.tokens, nan, SamplingParams(4), rollout.stopped)
    gap, _ = compare(engine, [broken], ALONE)
    assert not gap.ok
    assert gap.tokens == 8
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    gap, draws = compare(engine, [broken], ALONE)
    assert not gap.ok
    assert draws.problems
    assert (gap.tokens, gap.not_finite) == (0, 8)
    with pytest.raises(RolloutMismatch, match=r"not finite at (\d+) of \1 answer tokens; the w"):
        check_rollouts(engine, prompts, SamplingParams(8), ALONE)


def test_the_longest_and_the_shortest_prompts_are_tried(build, monkeypatch):
    """Positions that are wrong from the 41st on show in long rows only."""
    engine = engine_of(build("llama"))
    lengths = [9, 12, 3, 45, 7, 1, 10, 8]
    rows = [[(3 + 7 * i + length) % 97 for i in range(length)] for length in lengths]
    tried = []
    rollout = engine.generator.rollout
    monkeypatch.setattr(
        engine.generator, "rollout", lambda p, *more: tried.append(p) or rollout(p, *more)
    )
    check_rollouts(engine, rows, SamplingParams(8), ALONE)
    assert [sorted(map(len, given)) for given in tried] == [[1, 7, 9, 45]] * 3
    decode = InferenceModel.decode
    monkeypatch.setattr(
        InferenceModel,
        "decode",
        lambda self, tokens, p, step: decode(self, tokens, torch.where(p > 40, p + 1, p), step),
    )
    short = [row for row in rows if len(row) <= 12]
    check_rollouts(engine, short, SamplingParams(8), ALONE)
    with pytest.raises(RolloutMismatch):
        check_rollouts(engine, rows, SamplingParams(8), ALONE)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_try_other_prompts(rank, build, monkeypatch):
    engine = engine_of(build("llama"))
    tried = []
    rollout = engine.generator.rollout
    monkeypatch.setattr(
        engine.generator, "rollout", lambda p, *more: tried.append(p) or rollout(p, *more)
    )
    rows = [[3 + i] * (1 + i) for i in range(12)]
    there = Dist(rank=rank, local_rank=0, world_size=1, device=torch.device("cpu"))
    check_rollouts(engine, rows, SamplingParams(4), there)
    assert sorted(map(len, tried[0])) == [[1, 4, 8, 12], [2, 5, 9, 11]][rank]


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_the_check_decodes_as_the_runs_rollouts_will(build, monkeypatch):
    decode = CompiledDecoder._decode

    def wrong(self, ids_BP, positions_BP, step):
        logits_BV = decode(self, ids_BP, positions_BP, step)
        # Its own first use, on two rows, must not find it.
        return logits_BV if len(ids_BP) == 2 else logits_BV.roll(1, dims=1)

    monkeypatch.setattr(CompiledDecoder, "_decode", wrong)
    engine = engine_of(build("llama"))
    rows, params = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]], SamplingParams(8)
    check_rollouts(engine, rows, params, ALONE)  # so few tokens are not compiled for

    with pytest.raises(RolloutMismatch):
        check_rollouts(engine, rows, params, ALONE, answers=AUTO_TOKENS // 8)
