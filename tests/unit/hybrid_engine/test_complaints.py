"""What users of other hybrid engines reported, each as a test on a real DeepSpeed engine.

`dscN` is case N of what was read of DeepSpeed-Chat's and DeepSpeed's issues, `peersN` of other
trainers'. More of them lie where their subject is tested: `grep -rn test_complaint_ tests`.
"""

import logging
import math
import weakref

import pytest
import torch

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, SamplingParams, initialize
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace
from rlhf_app.training.distributed import close, setup
from stages.ppo.experience import lay_out
from stages.ppo.logprobs import policy_logprobs, score_policy

VOCAB = 97
NEW = 12
BATCH = torch.tensor([[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25]])


@pytest.fixture(scope="module", autouse=True)
def group():
    yield setup()
    close()


def engine_of(model, lr=1e-2, **block):
    half = next(model.parameters()).dtype == torch.bfloat16
    return initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1 if half else 0},
            "bf16": {"enabled": half},
            "hybrid_engine": block,
        },
    )[0]


def train_once(engine):
    engine.train()
    engine.backward(engine(input_ids=BATCH, labels=BATCH).loss)
    engine.step()


def plain_logprobs(model, prompt, answer):
    """Of the answer's tokens, by transformers' forward of this row alone."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)[range(len(answer)), answer]


# DeepSpeed 0.19's hybrid engine breaks on each of these with transformers 5.24: a tuple for a
# tensor, shapes of GQA, missing methods, or (GPT-Neo) silently other tokens.
@pytest.mark.parametrize(
    "family",
    ["opt", "opt-350m", "llama-mha", "llama", "gpt2", "gpt-neo", "gptj", "gpt-neox", "bloom"],
)
def test_complaint_dsc2_dsc16_peers19_tokens_are_huggingfaces_before_and_after_updates(
    family, build, prompts, hf_greedy, assert_same_greedy
):
    """On the installed transformers; GPT-2 and BLOOM also survive their first training step."""
    model = build(family)
    engine = engine_of(model, lr=3e-3)
    seen = []
    for _ in range(3):
        engine.eval()
        got = engine.rollout(prompts, SamplingParams(NEW, greedy=True)).tokens
        assert_same_greedy(model, prompts, got, hf_greedy(model, prompts, NEW))
        seen.append(got)
        train_once(engine)
    assert engine.global_steps == 3
    assert seen[0] != seen[1] != seen[2]


def test_complaint_dsc3_answers_that_are_only_eos_are_kept(build, prompts):
    """Whatever comes first ends the answer: one token each, all kept, in order."""
    engine = engine_of(build("llama"))
    engine.eval()
    every_token = tuple(range(VOCAB))
    for greedy in (True, False):
        params = SamplingParams(NEW, greedy=greedy, stop_ids=every_token)
        rollout = engine.rollout(prompts, params, max_slots=5)
        assert len(rollout.tokens) == len(prompts)
        assert all(len(tokens) == 1 for tokens in rollout.tokens)
        assert all(rollout.stopped)
        for prompt, tokens, logprobs in zip(prompts, rollout.tokens, rollout.logprobs, strict=True):
            want = plain_logprobs(engine.module, prompt, tokens)
            assert logprobs.item() == pytest.approx(want.item(), abs=1e-4)
    ids = torch.tensor([[5, 6], [7, 8]])
    out = engine.generate(ids, max_new_tokens=NEW, eos_token_id=list(every_token))
    assert out.shape == (2, 3)


@pytest.mark.parametrize(
    ("block", "limit"),
    [({}, r"the model's positions \(64\)"), ({"max_out_tokens": 32}, r"max_out_tokens \(32\)")],
)
def test_complaint_dsc24_a_row_too_long_is_an_error_not_an_illegal_access(block, limit, build):
    """Both ways in; what fits to the last position works, and goes on working."""
    engine = engine_of(build("llama"), **block)
    engine.eval()
    most = block.get("max_out_tokens", 64)
    fits = [[5] * (most - NEW), [6]]
    before = engine.rollout(fits, SamplingParams(NEW, greedy=True)).tokens
    with pytest.raises(ConfigError, match=f"{most - NEW + 1} tokens .* exceed .*{limit}"):
        engine.rollout([[6], [5] * (most - NEW + 1)], SamplingParams(NEW))
    with pytest.raises(ConfigError, match=limit):
        engine.generate(torch.full((2, most - NEW + 1), 5), max_new_tokens=NEW)
    assert engine.rollout(fits, SamplingParams(NEW, greedy=True)).tokens == before


def test_complaint_dsc25_the_workspace_is_gone_while_bloom_trains(build, prompts):
    """With `release_inference_cache`: its memory is free at the training forward."""
    engine = engine_of(build("bloom"), release_inference_cache=True)
    generator = engine.generator
    buffers, held = [], []
    allocate = KVWorkspace._allocate

    def noted(self, slots, positions):
        allocate(self, slots, positions)
        buffers.append(weakref.ref(self.keys[0].untyped_storage()))
        assert self.nbytes == sum(tensor.nbytes for pair in self._groups for tensor in pair)

    hook = engine.module.register_forward_hook(
        lambda module, *_: held.append(generator.workspace_bytes) if module.training else None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVWorkspace, "_allocate", noted)
        for _ in range(3):
            engine.eval()
            engine.rollout(prompts, SamplingParams(NEW))
            train_once(engine)
            assert all(ref() is None for ref in buffers)
    hook.remove()
    assert held == [0, 0, 0]
    assert len(buffers) >= 3
    # 24 rows of 32 positions; keys and values of 4 heads of 8 in 3 layers, fp32.
    assert generator.workspace_peak_bytes == 24 * 32 * 2 * 4 * 8 * 3 * 4


def test_complaint_dsc26_an_unsupported_model_works_and_its_time_is_booked(
    build, prompts, hf_greedy, caplog
):
    """No silent switch, no time of 0.00 s: a warning that names type and missing capability."""
    model = build("mpt")
    engine = engine_of(model)
    with caplog.at_level(logging.WARNING):
        engine.eval()
        got = engine.rollout(prompts[:4], SamplingParams(NEW, greedy=True)).tokens
        engine.rollout(prompts[:4], SamplingParams(2))
    warnings = [r.getMessage() for r in caplog.records if "native generate" in r.getMessage()]
    assert len(warnings) == 1
    assert "model type 'mpt' lacks a forward" in warnings[0]
    for prompt, tokens in zip(prompts, got, strict=False):
        assert tokens == hf_greedy(model, [prompt], NEW)[0]
    train_once(engine)
    engine.eval()
    assert engine.breakdown.generate > 0
    assert engine.breakdown.tokens == 4 * (NEW + 2)
    assert engine.breakdown.form == "native"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complaint_peers14_the_ratio_is_1_before_the_first_step(dtype, build, prompts):
    """Old log-probs come from the training forward in the layout of the update: to the last bit,
    with a rollout between the two; and the rollout's own are near them."""
    engine = engine_of(build("llama").to(dtype))
    engine.eval()
    rollout = engine.rollout(prompts, SamplingParams(NEW, temperature=0.8, stop_ids=(2,)))
    engine.train()
    answers = lay_out(prompts, rollout.tokens)
    old, _ = score_policy(engine, answers, temperature=0.8, suppress_ids=())
    engine.eval()
    engine.rollout(prompts, SamplingParams(NEW, greedy=True))
    engine.train()
    new, _ = policy_logprobs(engine, answers, temperature=0.8)
    assert new.requires_grad
    ratio = (new - old).exp()[answers.action_mask_BT]
    assert torch.equal(ratio, torch.ones_like(ratio))
    sampled = torch.cat(rollout.logprobs)
    gap = (sampled - old[answers.action_mask_BT]).abs()
    assert gap.mean() < (1e-5 if dtype == torch.float32 else 0.05)


def test_complaint_peers21_no_room_says_how_many_bytes_were_wanted_and_free(
    build, prompts, monkeypatch
):
    """Up front, before a token is drawn; the weights stay usable and a smaller rollout works."""
    zeros = KVWorkspace._zeros

    def small(self, size):
        if math.prod(size) > 4000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(self, size)

    engine = engine_of(build("llama"))
    monkeypatch.setattr(KVWorkspace, "_zeros", small)
    engine.eval()
    # 24 rows of 32 positions; keys and values of 2 heads of 8 in 3 layers, fp32.
    wanted = 24 * 32 * 2 * 2 * 8 * 3 * 4
    with pytest.raises(RuntimeError, match=rf"needs {wanted} bytes, free on cpu: \S+ bytes"):
        engine.rollout(prompts, SamplingParams(NEW))
    assert engine.generator.workspace_bytes == 0
    assert len(engine.rollout(prompts[:2], SamplingParams(4)).tokens) == 2


def test_complaint_peers23_keys_of_a_shared_prompt_never_outlive_an_update(build):
    """Four samples of one prompt share its prefill; after an update it is run anew."""
    model = build("llama")
    engine = engine_of(model, lr=0.05)
    rows = [[5, 6, 7, 8]] * 4 + [[9, 10, 11]] * 2
    seen = []
    for step in range(3):
        engine.eval()
        rollout = engine.rollout(rows, SamplingParams(NEW, step=step), max_slots=3)
        assert rollout.timings.prefilled_tokens < sum(map(len, rows))
        for prompt, tokens, logprobs in zip(rows, rollout.tokens, rollout.logprobs, strict=True):
            assert torch.allclose(logprobs, plain_logprobs(model, prompt, tokens), atol=1e-4)
        seen.append(plain_logprobs(model, rows[0], [7] * 4))
        train_once(engine)
    assert (seen[0] - seen[1]).abs().max() > 0.1 < (seen[1] - seen[2]).abs().max()


def test_complaint_dsc24_settings_without_an_engine_have_the_same_bounds(build):
    generator = Generator(build("opt"), HybridEngineSettings(max_out_tokens=16))
    with pytest.raises(ConfigError, match=r"hybrid_engine\.max_out_tokens \(16\)"):
        generator.rollout([[5] * 5], SamplingParams(12))
