"""The schedule of slots: against an ideal refill, and late looks at the finish flags."""

from __future__ import annotations

import random

import pytest
import torch
import transformers as tf

from rlhf_app.hybrid_engine import Generator, SamplingParams, decode_kernel
from rlhf_app.hybrid_engine.decode import CUDA_PACE, DecodeLoop
from rlhf_app.hybrid_engine.finish_flags import Ended, FinishFlags
from rlhf_app.hybrid_engine.refill import Pace, Refill, ideal_refill

PROMPT = 256
ENOUGH = 4096  # tokens of an efficient prefill on CUDA


def _geometric(count: int, mean: float, most: int, seed: int) -> list[int]:
    """Lengths of answers that end with probability 1 / mean at each token."""
    draw = random.Random(seed)
    lengths = []
    for _ in range(count):
        length = 1
        while length < most and draw.random() > 1 / mean:
            length += 1
        lengths.append(length)
    return lengths


def _step_by_step(lengths: list[int], slots: int) -> int:
    """Second implementation of the ideal: one step after the other."""
    waiting, active, steps = list(lengths), [], 0
    while waiting or active:
        while waiting and len(active) < slots:
            active.append(waiting.pop(0) - 1)
            active = [left for left in active if left]
        if active:
            steps += 1
            active = [left - 1 for left in active if left > 1]
    return steps


def test_ideal_refill_by_hand():
    """Slot A: 2 steps, then 0 of the answer of one token, then 4. Slot B: 3 steps, then 1."""
    assert ideal_refill([3, 4, 1, 5, 2], 2) == 6
    assert ideal_refill([1, 1, 1], 2) == 0
    assert ideal_refill([9], 4) == 8
    assert ideal_refill([], 4) == 0


@pytest.mark.parametrize("slots", [1, 3, 16, 200])
def test_ideal_refill_equals_a_walk_through_its_steps(slots):
    lengths = _geometric(100, 12, 40, seed=slots)
    assert ideal_refill(lengths, slots) == _step_by_step(lengths, slots)


def _schedule(
    lengths: list[int], limits: list[int], slots: int, pace: Pace
) -> tuple[int, list[int]]:
    """Drive the schedule as the decode loop does, with answers of these lengths.

    Returns:
        Decode steps, and requests of each prefill.
    """
    refill = Refill(range(len(lengths)), limits, slots, pace)
    started: dict[int, int] = {}
    done: set[int] = set()
    before: dict[int, int] = {}
    prefills = []
    while refill.waiting or refill.rows:
        if refill.worthwhile(refill.free * PROMPT, ENOUGH):
            group = [refill.waiting.popleft() for _ in range(min(refill.free, len(refill.waiting)))]
            for request in group:
                started[request] = refill.step
                refill.start(request, PROMPT, drawn=True)
            prefills.append(len(group))
        else:
            for _ in range(refill.burst()):
                refill.advance()
        assert len(refill.rows) <= slots
        ended = {
            row.request: lengths[row.request]
            for row in refill.rows
            if refill.step - started[row.request] >= lengths[row.request] - 1
        }
        seen, before = (before, ended) if pace.late else (ended, {})
        active = {row.request for row in refill.rows}
        refill.retire(seen)
        gone = active - {row.request for row in refill.rows}
        assert all(refill.step - started[i] >= lengths[i] - 1 for i in gone), "cut short"
        done |= gone
    assert done == set(range(len(lengths)))
    return refill.step, prefills


@pytest.mark.parametrize("known", [False, True], ids=["stops", "limits"])
@pytest.mark.parametrize("slots", [32, 128, 512])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_are_within_five_percent_of_an_ideal_refill(seed, slots, known):
    """1,024 answers of min(geometric(1/96), 256) tokens; utilisation goes as 1 / steps."""
    lengths = _geometric(1024, 96, 256, seed)
    limits = lengths if known else [256] * 1024
    steps, prefills = _schedule(lengths, limits, slots, CUDA_PACE)
    ideal = ideal_refill(lengths, slots)
    assert ideal <= steps <= 1.05 * ideal
    # And prefills do not shrink to single prompts for it: each takes a share of the slots.
    assert sum(prefills) / len(prefills) >= min(slots // 16, ENOUGH // PROMPT)


@pytest.mark.parametrize(("known", "pace"), [(False, Pace()), (True, CUDA_PACE)])
def test_an_end_seen_at_once_is_the_ideal_where_every_slot_is_a_share(known, pace):
    """A limit that is reached needs no look."""
    lengths = _geometric(200, 20, 60, seed=5)
    steps, _ = _schedule(lengths, lengths if known else [60] * 200, 15, pace)
    assert steps == ideal_refill(lengths, 15)


def test_bursts_are_as_short_as_answers():
    def burst(limit: int, waiting: int) -> int:
        refill = Refill(range(4 + waiting), [limit] * (4 + waiting), 4, CUDA_PACE)
        for _ in range(4):
            refill.start(refill.waiting.popleft(), PROMPT, drawn=True)
        return refill.burst()

    assert [burst(limit, 9) for limit in (1, 2, 64, 128, 300, 10_000)] == [0, 1, 1, 2, 4, 8]


def test_a_burst_ends_where_a_waiting_request_could_start():
    refill = Refill(range(3), [1000, 4, 1000], 2, CUDA_PACE)
    for _ in range(2):
        refill.start(refill.waiting.popleft(), PROMPT, drawn=True)
    assert refill.burst() == 3
    for _ in range(3):
        refill.advance()
    assert refill.retire({}) == ([], [])
    assert [row.request for row in refill.rows] == [0]


def test_the_last_rows_take_the_places_of_those_that_ended():
    refill = Refill(range(6), [9] * 6, 6, Pace())
    for _ in range(6):
        refill.start(refill.waiting.popleft(), PROMPT, drawn=True)
    # Request 7 was taken out before: a late look sees its end once more.
    assert refill.retire({0: 1, 3: 1, 5: 1, 7: 2}) == ([4], [0])
    assert [row.request for row in refill.rows] == [4, 1, 2]


def test_a_late_look_is_read_one_look_later():
    state = torch.tensor([[4, 2, 9], [1, 0, 0], [0, 1, 0]])
    flags = FinishFlags(state, late=True)
    assert flags.look([10, 11]) == {}
    state[1] = 0  # what comes later does not change what was seen
    assert flags.look([12]) == {11: Ended(2, True)}
    assert flags.last() == {12: Ended(4, False)}
    assert flags.last() == {}
    assert FinishFlags(state, late=False).look([7, 8, 9]) == {
        7: Ended(4, False), 8: Ended(2, True), 9: Ended(9, False),
    }  # fmt: skip


@pytest.fixture(params=[Pace(1, late=True), Pace(8, late=True), Pace(3)], ids=str)
def pace(request, monkeypatch):
    """How the host would follow a CUDA device, on the CPU."""
    monkeypatch.setattr(DecodeLoop, "_pace", lambda _: request.param)
    # Bursts of several steps for short answers too.
    monkeypatch.setattr("rlhf_app.hybrid_engine.refill._MEAN_LENGTH_PER_STEP", 2)
    return request.param


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("limited", [False, True])
def test_answers_do_not_depend_on_when_ends_are_seen(family, limited, pace, build, prompts):
    generator = Generator(build(family))
    requests = [*prompts, *prompts[:8], *prompts[:8]]
    params = SamplingParams(12, seed=7, step=2, stop_ids=(2, 11, 30))
    limits = [1 + 5 * i % 12 for i in range(len(requests))] if limited else None
    alone = [
        generator.rollout([p], params, uids=[i], limits=limits and [limits[i]])
        for i, p in enumerate(requests)
    ]
    for slots in (None, 3, 11):
        got = generator.rollout(requests, params, max_slots=slots, limits=limits)
        assert got.tokens == [rollout.tokens[0] for rollout in alone]
        assert got.stopped == [rollout.stopped[0] for rollout in alone]
        for logprobs, rollout in zip(got.logprobs, alone, strict=True):
            torch.testing.assert_close(logprobs, rollout.logprobs[0], atol=1e-5, rtol=0)
        timings = got.timings
        assert timings.slot_steps == timings.decode_steps * (slots or len(requests))
        assert timings.slot_tokens == timings.generated_tokens - len(requests)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [128, 512])
def test_the_decode_loop_keeps_to_the_schedule(slots, monkeypatch):
    """1,024 answers of a model that is nearly nothing, their ends drawn and seen late."""
    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=97, n_positions=300, n_embd=8, n_layer=1, n_head=1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip
    monkeypatch.setattr(DecodeLoop, "_pace", lambda _: CUDA_PACE)
    prompts = [[3 + i % 90, 3 + i // 90] for i in range(1024)]
    # Logits are nearly equal: each token ends an answer with a probability of about 1/97.
    params = SamplingParams(256, stop_ids=(2,))
    rollout = Generator(model).rollout(prompts, params, max_slots=slots)
    lengths = list(map(len, rollout.tokens))
    assert 80 < sum(lengths) / 1024 < 100
    steps = rollout.timings.decode_steps
    # The schedule's own order: prompts are all of one length, so that of the list.
    assert ideal_refill(lengths, slots) <= steps <= 1.05 * ideal_refill(lengths, slots)
    tokens = sum(lengths) - 1024
    assert rollout.timings.slot_utilisation == pytest.approx(tokens / (steps * slots))


def test_rows_in_any_slot_are_refilled_late(pace, build, prompts, monkeypatch):
    """With the decode kernel rows do not move their keys and values, but change their slots."""
    want = Generator(build("llama")).rollout(prompts, SamplingParams(12, stop_ids=(2, 11, 30)))

    def attend(query, new_key, new_value, keys, values, slots_B, lengths_B, **options):
        rows = []
        for row, (slot, length) in enumerate(zip(slots_B, lengths_B, strict=True)):
            keys[slot, :, length], values[slot, :, length] = (
                new_key[row, :, 0],
                new_value[row, :, 0],
            )
            groups = query.shape[1] // keys.shape[1]
            k = keys[slot, :, : length + 1].repeat_interleave(groups, 0)
            v = values[slot, :, : length + 1].repeat_interleave(groups, 0)
            weights = torch.softmax(query[row] @ k.transpose(-1, -2) * options["scale"], -1)
            rows.append(weights @ v)
        return torch.stack(rows)

    monkeypatch.setattr(decode_kernel, "available", lambda *_: True)
    monkeypatch.setattr(decode_kernel, "decode_attention", attend)
    for slots in (3, 7, None):
        got = Generator(build("llama")).rollout(
            prompts, SamplingParams(12, stop_ids=(2, 11, 30)), max_slots=slots
        )
        assert got.tokens == want.tokens
        assert got.stopped == want.stopped
