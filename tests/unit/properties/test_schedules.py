"""Which rows go where: micro-batches of all ranks, and the slots of a rollout."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_app.config.schema import PPOConfig
from rlhf_app.hybrid_engine.refill import Pace, Refill
from rlhf_app.training.batching import batches, rank_slices
from rlhf_app.training.distributed import Dist
from rlhf_app.training.micro_batches import BatchLimit
from stages.ppo.batching import score_batches, update_batches
from stages.ppo.prompts import rank_uids

FUZZ = settings(max_examples=150, deadline=None, derandomize=True)
CPU = torch.device("cpu")


class Asked(Dist):
    """A rank that is told the largest of all ranks' numbers; its own are noted."""

    def max(self, value: int) -> int:
        noted.append(value)
        return max(noted) if largest is None else largest


noted: list[int] = []
largest: int | None = None


def on_ranks(count, run):
    """What each rank returns, with `Dist.max` as it is among them."""
    global largest
    noted.clear()
    largest = None
    places = [Asked(rank, rank, count, CPU) for rank in range(count)]
    for place in places:
        run(place)
    largest = max(noted)
    return [run(place) for place in places]


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[PPOConfig, list[int], int]:
    """Settings whose sizes divide, the lengths of all answers, and a number of ranks."""
    ranks, minis, micro = (draw(st.integers(1, 3)) for _ in range(3))
    each = draw(st.integers(1, 3)) * ranks * minis * micro
    ppo = PPOConfig(
        rollout_batch_size=each, mini_batches=minis, micro_batch_size=micro,
        micro_batch_tokens=draw(st.none() | st.integers(1, 60)),
        score_batch_tokens=draw(st.none() | st.integers(1, 90)),
    )  # fmt: skip
    return ppo, draw(st.lists(st.integers(1, 30), min_size=each, max_size=each)), ranks


@FUZZ
@given(rollouts())
def test_every_answer_is_updated_and_scored_once_on_one_rank(case):
    ppo, lengths, ranks = case
    uids = [rank_uids(ppo, Dist(rank, rank, ranks, CPU)) for rank in range(ranks)]
    assert sorted(uid for mine in uids for uid in mine) == list(range(ppo.rollout_batch_size))

    def own(dist: Dist) -> list[int]:
        return [lengths[uid] for uid in uids[dist.rank]]

    updates = on_ranks(ranks, lambda dist: update_batches(own(dist), ppo, dist))
    scores = on_ranks(ranks, lambda dist: score_batches(own(dist), ppo, dist))
    size = ppo.rollout_batch_size // ppo.mini_batches
    for kind, tokens in ((updates, ppo.micro_batch_tokens), (scores, ppo.score_batch_tokens)):
        assert len({len(parts) for parts in kind}) == 1, "every rank: as many forwards"
        for rank, parts in enumerate(kind):
            assert Counter(row for part in parts for row in part) == Counter(range(len(uids[rank])))
            for part in parts:
                assert part
                longest = max(lengths[uids[rank][row]] for row in part)
                if tokens is not None:
                    assert len(part) == 1 or len(part) * longest <= tokens
                elif ppo.micro_batch_tokens is None:
                    assert len(part) <= ppo.micro_batch_size
    # What one optimizer step sees are the rows of its mini-batch, whatever the ranks.
    steps = len(updates[0]) // ppo.mini_batches
    assert steps * ppo.mini_batches == len(updates[0])
    for mini in range(ppo.mini_batches):
        seen = [
            uids[rank][row]
            for rank in range(ranks)
            for part in updates[rank][mini * steps : (mini + 1) * steps]
            for row in part
        ]
        assert sorted(seen) == list(range(mini * size, (mini + 1) * size))


@FUZZ
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=25),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 4),
    st.none() | st.integers(1, 50),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_an_epoch_is_every_row_once_over_all_ranks(
    lengths, size, micro, world, tokens, epochs, seed
):
    """From any point on, as well: a run that goes on sees what an unbroken one would."""
    limit = BatchLimit(micro, tokens)
    per_epoch = -(-len(lengths) // size)
    steps = list(batches(len(lengths), size, seed, epochs * per_epoch))
    for done in range(len(steps) + 1):
        rest = list(batches(len(lengths), size, seed, len(steps), done=done))
        assert rest == steps[done:]
    seen: Counter[int] = Counter()
    for step in steps:
        shares = [rank_slices(step, lengths, limit, rank, world) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        for part in (part for share in shares for part in share):
            seen.update(part)
            if tokens is not None:
                assert len(part) <= 1 or len(part) * max(lengths[r] for r in part) <= tokens
            else:
                assert len(part) <= micro
    assert seen == Counter(dict.fromkeys(range(len(lengths)), epochs))


@st.composite
def schedules(draw: st.DrawFn):
    """Answers of some length within their limits, the order, slots and pace of a rollout."""
    # Bursts of several steps need long answers; what they may run past are short ones.
    sizes = st.integers(1, 3) | st.integers(1, 90) | st.integers(250, 600)
    limits = draw(st.lists(sizes, min_size=1, max_size=20))
    lengths = [draw(st.just(limit) | st.integers(1, limit)) for limit in limits]
    order = draw(st.permutations(range(len(limits))))
    pace = Pace(draw(st.integers(1, 8)), late=draw(st.booleans()))
    return lengths, limits, order, draw(st.integers(1, 22)), pace, draw(st.booleans())


@FUZZ
@given(schedules(), st.integers(1, 4096), st.integers(1, 300))
def test_every_request_has_one_slot_once_in_order_to_its_end(case, enough, prompt):
    lengths, limits, order, slots, pace, drawn = case
    refill = Refill(order, limits, slots, pace)
    place: list[int] = []  # whose row is in each place, moved as the caller moves its tensors
    started: dict[int, int] = {}
    begun, gone, before, row_steps, waiting = [], [], {}, 0, True
    for _ in range(10 * (len(limits) + sum(limits))):
        if not (refill.waiting or refill.rows):
            break
        assert refill.free == slots - len(place) >= 0
        if refill.worthwhile(refill.free * prompt, enough):
            while refill.free and refill.waiting:
                request = refill.waiting.popleft()
                begun.append(request)
                started[request] = refill.step
                refill.start(request, 7, drawn)
                place.append(request)
        else:
            assert refill.rows, "somebody waits and nobody works"
            waiting = bool(refill.waiting)
            burst = refill.burst()
            assert 0 <= burst <= pace.most_steps
            for _ in range(burst):
                refill.advance()
                row_steps += len(place)
        tokens = {r: refill.step - started[r] + drawn for r in place}
        # A row at its limit idles, but only while nobody waits for its slot.
        assert not waiting or all(tokens[r] <= limits[r] for r in place)
        ended = {r: lengths[r] for r in place if tokens[r] >= lengths[r]}
        seen, before = (before, ended) if pace.late else (ended, {})
        sources, targets = refill.retire(seen)
        left = len(refill.rows)
        kept = list(place)
        for source, target in zip(sources, targets, strict=True):
            kept[target] = place[source]
        leaving = set(place) - set(kept[:left])
        assert len(place) - len(leaving) == left
        assert all(tokens[r] >= min(lengths[r], limits[r]) for r in leaving), "cut short"
        place = kept[:left]
        assert [row.request for row in refill.rows] == place
        gone += leaving
    assert begun == list(order)
    assert sorted(gone) == list(range(len(limits)))
    assert refill.row_steps == row_steps
