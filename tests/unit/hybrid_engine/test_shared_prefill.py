"""Answers to one prompt share its prefill; rows in any slot answer as rows in their own."""

from __future__ import annotations

import pytest
import torch

from rlhf_app.hybrid_engine import Generator, SamplingParams, decode_kernel
from rlhf_app.hybrid_engine.decode_step import DecodeStep, bucket
from rlhf_app.hybrid_engine.inference_model import InferenceModel

PARAMS = SamplingParams(12, seed=7, step=2, stop_ids=(2, 11, 30))
COPIES = 5


@pytest.fixture
def repeated(prompts):
    """Each of eight prompts five times, not side by side."""
    return [prompt for _ in range(COPIES) for prompt in prompts[:8]]


@pytest.fixture
def prefilled(monkeypatch):
    """Real tokens of every prefill that runs."""
    seen: list[int] = []
    prefill = InferenceModel.prefill

    def count(self, ids, lengths, step):
        seen.append(int(lengths.sum()))
        return prefill(self, ids, lengths, step)

    monkeypatch.setattr(InferenceModel, "prefill", count)
    return seen


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral-window", "bloom"])
def test_answers_equal_those_of_prompts_run_alone(family, build, repeated):
    generator = Generator(build(family))
    alone = [generator.rollout([p], PARAMS, uids=[uid]) for uid, p in enumerate(repeated)]
    for slots in (None, 1, 3, 11):
        got = generator.rollout(repeated, PARAMS, max_slots=slots)
        assert 0 < sum(got.stopped) < len(repeated)
        assert got.tokens == [rollout.tokens[0] for rollout in alone]
        for logprobs, rollout in zip(got.logprobs, alone, strict=True):
            torch.testing.assert_close(logprobs, rollout.logprobs[0], atol=1e-5, rtol=0)


def test_each_distinct_prompt_is_prefilled_once(build, repeated, prefilled):
    generator = Generator(build("llama"))
    generator.capability  # noqa: B018 - the probe runs prefills of its own
    prefilled.clear()
    timings = generator.rollout(repeated, PARAMS).timings
    assert sum(prefilled) == sum(map(len, repeated[:8])) == timings.prefilled_tokens
    assert timings.prompt_tokens == COPIES * timings.prefilled_tokens


def test_a_late_answer_joins_one_that_is_still_running(build, prompts, prefilled):
    generator = Generator(build("llama"))
    generator.capability  # noqa: B018
    prefilled.clear()
    prompt = prompts[1]
    params = SamplingParams(12, seed=7, stop_ids=tuple(range(2, 30)))
    rollout = generator.rollout([prompt] * 9, params, max_slots=3)
    assert len({len(row) for row in rollout.tokens}) > 2
    # Without joining, every refill would run the prompt again.
    assert sum(prefilled) <= 2 * len(prompt)


def test_generate_shares_the_prefill_of_num_return_sequences(build, prefilled):
    generator = Generator(build("llama"))
    generator.capability  # noqa: B018
    prefilled.clear()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    out = generator.generate(ids, do_sample=True, num_return_sequences=3, max_new_tokens=4, top_k=0)
    assert out.shape == (6, 8)
    assert torch.equal(out[:, :4], ids.repeat_interleave(3, 0))
    assert sum(prefilled) == 8


class _AnySlot:
    """The decode kernel's contract in plain torch, so that its bookkeeping runs anywhere."""

    def __init__(self) -> None:
        self.slots: set[tuple[int, ...]] = set()

    def __call__(self, query, new_key, new_value, keys, values, slots_B, lengths_B, **options):
        self.slots.add(tuple(slots_B.tolist()))
        rows = []
        for row, (slot, length) in enumerate(zip(slots_B, lengths_B, strict=True)):
            keys[slot, :, length] = new_key[row, :, 0]
            values[slot, :, length] = new_value[row, :, 0]
            end = int(length) + 1
            start = max(0, end - options["window"]) if options["window"] else 0
            groups = query.shape[1] // keys.shape[1]
            k = keys[slot, :, start:end].repeat_interleave(groups, 0)
            v = values[slot, :, start:end].repeat_interleave(groups, 0)
            logits = query[row] @ k.transpose(-1, -2) * options["scale"]
            rows.append(torch.softmax(logits, -1) @ v)
        return torch.stack(rows)


def _store_prompts(new_keys, new_values, keys, values, slots):
    keys[slots, :, : new_keys.shape[2]] = new_keys
    values[slots, :, : new_values.shape[2]] = new_values


@pytest.fixture
def any_slot(monkeypatch):
    kernel = _AnySlot()
    monkeypatch.setattr(decode_kernel, "available", lambda *_: True)
    monkeypatch.setattr(decode_kernel, "decode_attention", kernel)
    monkeypatch.setattr(decode_kernel, "store_prompts", _store_prompts)
    return kernel


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@pytest.mark.parametrize("slots", [None, 3, 11])
def test_rows_in_any_slot(family, slots, build, repeated, prompts, any_slot, monkeypatch):
    requests = [*repeated, *prompts]
    got = Generator(build(family)).rollout(requests, PARAMS, max_slots=slots)
    assert any(list(used) != sorted(used) for used in any_slot.slots), "no row left its slot"
    monkeypatch.undo()
    want = Generator(build(family)).rollout(requests, PARAMS, max_slots=slots)
    assert got.tokens == want.tokens
    assert got.stopped == want.stopped


def test_idle_rows_of_a_bucket_harm_nobody(build, prompts, any_slot, monkeypatch):
    """A captured step computes a bucket of rows: those behind the active ones are nobody's."""
    model = build("llama")
    requests = prompts[::-1][:16]
    want = Generator(model).rollout(requests, PARAMS)
    run, sizes = DecodeStep._run, []

    def padded(self, rows, longest, equal):
        sizes.append((rows, bucket(rows, self._slots)))
        return run(self, sizes[-1][1], longest, equal)

    monkeypatch.setattr(DecodeStep, "_run", padded)
    got = Generator(model).rollout(requests, PARAMS)
    assert sum(size - rows for rows, size in sizes) > 16
    assert got.tokens == want.tokens
    assert got.stopped == want.stopped
    torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-5, rtol=0)
