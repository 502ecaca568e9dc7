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
from rlhf_app.hybrid_engine.rollout_check import (
    Answered,
    RolloutMismatch,
    check_rollouts,
    compare,
    training_logprobs,
)
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
    assert 32 <= numbers["tokens"] <= 64  # 4 prompts, greedy and sampled


def test_it_takes_less_than_a_second(build, prompts):
    engine = engine_of(build("llama"))
    start = time.process_time()
    check_rollouts(engine, prompts, SamplingParams(256), ALONE)
    assert time.process_time() - start < 1.0


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
    got = training_logprobs(model, Answered(prompts, answers, [], params))
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
        rollout = engine.rollout(prompts[:4], SamplingParams(8))
        answered = Answered(prompts[:4], rollout.tokens, rollout.logprobs, SamplingParams(8))
        gap = compare(engine, [answered], ALONE)
        assert gap.ok
        bounds.append(gap.mean_bound)
    assert bounds[1] == pytest.approx(bounds[0], rel=0.2)


def test_a_sharp_model_is_judged_by_its_own_noise(build, prompts):
    """Rounding that two training forwards show themselves is no error of the rollout."""
    engine = engine_of(build("llama").to(torch.bfloat16))
    engine.train()
    rows = prompts[:4]
    rollout = engine.rollout(rows, SamplingParams(8))
    answered = [Answered(rows, rollout.tokens, rollout.logprobs, SamplingParams(8))]
    gap = compare(engine, answered, ALONE, floor=True)
    assert gap.ok
    assert gap.tokens == 32
    assert gap.max_bound >= 8 * gap.floor_max
    assert gap.mean_bound >= 4 * gap.floor_mean


def test_a_nan_of_the_rollout_alone_is_an_error_and_broken_weights_are_left_to_training(build):
    model = build("llama")
    engine = engine_of(model)
    rows = [[5, 6], [7]]
    rollout = engine.rollout(rows, SamplingParams(4))
    nan = [torch.full_like(row, math.nan) for row in rollout.logprobs]
    gap = compare(engine, [Answered(rows, rollout.tokens, nan, SamplingParams(4))], ALONE)
    assert not gap.ok
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    gap = compare(engine, [Answered(rows, rollout.tokens, nan, SamplingParams(4))], ALONE)
    assert gap.ok
    assert gap.tokens == 0
