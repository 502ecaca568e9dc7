import pytest
import torch

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, SamplingParams, decode_memory
from rlhf_app.hybrid_engine.attention import Decode
from rlhf_app.hybrid_engine.inference_model import InferenceModel


@pytest.mark.parametrize(
    ("mutation", "equal_lengths"),
    [
        ("position", False),
        ("position", True),
        ("last_token", False),
        ("last_token", True),
        ("mask", False),
        ("length", False),
    ],
)
def test_greedy_comparison_sees_broken_engines(
    mutation, equal_lengths, build, prompts, hf_greedy, assert_same_greedy, monkeypatch
):
    model = build("llama" if mutation != "position" else "gpt2")
    if equal_lengths:
        prompts = [p[:4] for p in prompts if len(p) >= 4]
    want = hf_greedy(model, prompts, 10)
    generator = Generator(model)
    assert generator.capability.missing is None  # before the mutation, which the probe sees
    if mutation == "position":
        decode = InferenceModel.decode
        monkeypatch.setattr(InferenceModel, "decode", lambda s, t, p, k: decode(s, t, p + 1, k))
    elif mutation == "mask":
        monkeypatch.setattr(
            Decode, "_hidden", lambda s, w, d: torch.zeros(len(s.lengths_B), 1, 1, s.longest + 1)
        )
    elif mutation == "length":
        mask = Decode._hidden

        def one_less(self, window, dtype):
            self.lengths_B = self.lengths_B - 1
            made = mask(self, window, dtype)
            self.lengths_B = self.lengths_B + 1
            return made

        monkeypatch.setattr(Decode, "_hidden", one_less)
    else:
        prefill = InferenceModel.prefill
        monkeypatch.setattr(
            InferenceModel, "prefill", lambda s, i, n, k: prefill(s, i, (n - 1).clamp(min=1), k)
        )
    got = generator.rollout(prompts, SamplingParams(10, greedy=True)).tokens
    with pytest.raises(AssertionError, match="rows differ"):
        assert_same_greedy(model, prompts, got, want)


@pytest.mark.parametrize("family", ["opt-350m", "gpt2", "llama", "gemma2", "mistral-window"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(12, temperature=0.7, seed=3),
        SamplingParams(12, greedy=True),
        SamplingParams(12, suppress_ids=(2, 5, 9), seed=1),
    ],
    ids=["tempered", "greedy", "suppressed"],
)
def test_logprobs_equal_a_fresh_training_forward(family, params, build, prompts):
    model = build(family)
    rollout = Generator(model).rollout(prompts, params, max_slots=9)
    model.train()
    for prompt, tokens, logprobs in zip(prompts, rollout.tokens, rollout.logprobs, strict=True):
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logits = logits.detach() / params.temperature
        logits[:, list(params.suppress_ids)] = -torch.inf
        want = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), tokens]
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs, want, atol=1e-4, rtol=0)


def test_samples_depend_on_neither_slots_nor_order(build, prompts):
    generator = Generator(build("llama"))
    params = SamplingParams(12, seed=7, step=2, stop_ids=(2, 11, 30))
    uids = [1000 + 7 * i for i in range(len(prompts))]
    want = generator.rollout(prompts, params, uids)
    assert len({len(row) for row in want.tokens}) > 3, "no row ended early: nothing is tested"
    for slots in (1, 2, 5, 24):
        got = generator.rollout(prompts, params, uids, max_slots=slots)
        assert got.tokens == want.tokens
        assert got.stopped == want.stopped
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = generator.rollout([prompts[i] for i in order], params, [uids[i] for i in order])
    assert shuffled.tokens == [want.tokens[i] for i in order]


def test_seed_step_and_uid_each_change_the_samples(build, prompts):
    generator = Generator(build("llama"))

    def run(uids=None, **changes):
        return generator.rollout(prompts, SamplingParams(8, **changes), uids).tokens

    base = run()
    assert run() == base
    assert run(seed=1) != base
    assert run(step=1) != base
    assert run(uids=range(1, 25)) != base


def test_answers_end_with_their_first_stop_token(build, prompts):
    generator = Generator(build("llama"))
    free = generator.rollout(prompts, SamplingParams(20, seed=5))
    stops = (30, 31, 2)
    ended = generator.rollout(prompts, SamplingParams(20, seed=5, stop_ids=stops))
    assert 0 < sum(ended.stopped) < len(prompts)
    for row, cut, stopped in zip(free.tokens, ended.tokens, ended.stopped, strict=True):
        at = [i for i, token in enumerate(row) if token in stops]
        assert cut == (row[: at[0] + 1] if at else row)
        assert stopped == bool(at)
    assert [len(x) for x in ended.logprobs] == [len(x) for x in ended.tokens]


def test_suppressed_ids_are_never_sampled(build, prompts):
    generator = Generator(build("llama"))
    free = generator.rollout(prompts, SamplingParams(20))
    common = sorted({t for row in free.tokens for t in row})[:40]
    got = generator.rollout(prompts, SamplingParams(20, suppress_ids=tuple(common)))
    assert not {t for row in got.tokens for t in row} & set(common)


def test_model_is_left_as_it_was(build, prompts):
    model = build("llama")
    model.train()
    model.model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    addresses = [p.data_ptr() for p in model.parameters()]
    generator = Generator(model)
    generator.rollout(prompts, SamplingParams(4))
    assert [m.training for m in model.modules()] == modes
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert model.config._attn_implementation == "sdpa"
    assert not model.lm_head._forward_pre_hooks
    loss = model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_model_is_restored_when_a_rollout_fails(build, prompts, monkeypatch):
    model = build("llama").train()
    generator = Generator(model)
    assert generator.capability.missing is None

    def fail(*_):
        raise KeyError("broken")

    monkeypatch.setattr(InferenceModel, "decode", fail)
    with pytest.raises(KeyError, match="broken"):
        generator.rollout(prompts, SamplingParams(4))
    assert all(m.training for m in model.modules())
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.undo()
    assert len(generator.rollout(prompts, SamplingParams(4)).tokens) == len(prompts)


def test_workspace_is_kept_or_given_back(build, prompts):
    model = build("llama")
    kept = Generator(model)
    kept.rollout(prompts, SamplingParams(4), max_slots=6)
    # 3 layers x 6 rows x 16 positions x 2 kv heads x (8 + 8) x 4 bytes
    assert kept.workspace_bytes == 3 * 6 * 16 * 2 * 16 * 4
    released = Generator(model, HybridEngineSettings(release_inference_cache=True))
    released.rollout(prompts, SamplingParams(4))
    assert released.workspace_bytes == 0


def test_prompt_and_answer_fill_the_last_position(build, hf_greedy):
    model = build("opt")
    prompt = [list(range(3, 43))]
    got = Generator(model).rollout(prompt, SamplingParams(24, greedy=True)).tokens
    assert got == hf_greedy(model, prompt, 24)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.rollout([], SamplingParams(4)), "no prompts"),
        (lambda g: g.rollout([[1], []], SamplingParams(4)), "prompt 1 is empty"),
        (lambda g: g.rollout([[1]], SamplingParams(4), uids=[1, 2]), "2 uids for 1"),
        (lambda g: g.rollout([[1]], SamplingParams(4), max_slots=0), "max_slots is 0"),
        (lambda g: g.rollout([[1] * 40], SamplingParams(25)), "model's positions .64."),
    ],
)
def test_bad_requests_are_refused(call, message, build):
    with pytest.raises(ConfigError, match=message):
        call(Generator(build("opt")))


def test_max_out_tokens_bounds_a_row(build):
    generator = Generator(build("opt"), HybridEngineSettings(max_out_tokens=10))
    generator.rollout([[5] * 6], SamplingParams(4))
    with pytest.raises(ConfigError, match=r"max_out_tokens \(10\)"):
        generator.rollout([[5] * 7], SamplingParams(4))


def test_timings_count_what_ran(build, prompts):
    timings = Generator(build("llama")).rollout(prompts, SamplingParams(6)).timings
    assert timings.prompt_tokens == sum(map(len, prompts))
    assert timings.generated_tokens == 6 * len(prompts)
    assert timings.decode_steps == 5
    assert timings.row_steps == 5 * len(prompts)
    assert 0 < timings.prefill_seconds < timings.total_seconds


@pytest.mark.parametrize(("release", "rows"), [(False, 5), (True, 8)])
def test_rows_at_once_are_bounded_by_free_memory(release, rows, build, prompts, monkeypatch):
    """On CUDA, where nobody bounds them: half of the free memory, or 0.8 of it."""
    generator = Generator(build("llama"), HybridEngineSettings(release_inference_cache=release))
    want = generator.rollout(prompts, SamplingParams(4))
    generator.release()
    # 3 layers x 16 positions x 2 kv heads x (8 + 8) x 4 bytes a row, and room for ten rows
    monkeypatch.setattr(decode_memory, "free_bytes", lambda _: 10 * 3 * 16 * 2 * 16 * 4)
    monkeypatch.setattr(decode_memory, "DecodeState", lambda _: None)
    monkeypatch.setattr(InferenceModel, "device", _CudaByName())
    seen = []
    monkeypatch.setattr(
        Generator, "_run", lambda self, request, longest: (seen.append(request.slots), want)[1]
    )
    generator.rollout(prompts, SamplingParams(4))
    generator.rollout(prompts, SamplingParams(4), max_slots=9)
    assert seen == [rows, 9]


class _CudaByName:
    type = "cuda"
