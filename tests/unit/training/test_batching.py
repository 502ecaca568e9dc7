from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_app.training.batching import batches, count_steps, epoch_order, pad_rows, rank_slices
from rlhf_app.training.micro_batches import BatchLimit


@given(st.integers(1, 60), st.integers(1, 17), st.integers(0, 5), st.integers(1, 3))
def test_each_epoch_uses_every_row_exactly_once(rows, batch_size, seed, epochs):
    steps = count_steps(rows, batch_size, epochs)
    per_epoch = -(-rows // batch_size)
    assert steps == epochs * per_epoch
    stream = list(batches(rows, batch_size, seed, steps))
    assert len(stream) == steps
    for epoch in range(epochs):
        seen = [row for b in stream[epoch * per_epoch : (epoch + 1) * per_epoch] for row in b]
        assert sorted(seen) == list(range(rows))


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 40), st.booleans())
def test_a_resumed_run_goes_on_in_the_middle_of_an_epoch(rows, batch_size, done, shuffled):
    whole = list(batches(rows, batch_size, 5, 40, shuffled=shuffled))
    assert list(batches(rows, batch_size, 5, 40, shuffled=shuffled, done=done)) == whole[done:]


@pytest.mark.parametrize("done", [7, 8, 12])
def test_complaint_openrlhf1350_peers17_an_epoch_that_does_not_divide_loses_no_row(done):
    """1000 rows in batches of 128: the eighth has 104, which a resumed run once skipped."""
    before = list(batches(1000, 128, 3, 16))[:done]
    rest = list(batches(1000, 128, 3, 16, done=done))
    sizes = [len(batch) for batch in before + rest]
    assert sizes == [*[128] * 7, 104] * 2
    for epoch in ((before + rest)[:8], (before + rest)[8:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(1000))


def test_last_partial_batch_is_kept():
    assert [len(b) for b in batches(10, 4, seed=0, total_steps=3)] == [4, 4, 2]


def test_order_differs_between_epochs_and_seeds_but_not_between_calls():
    assert epoch_order(50, 7, 0) == epoch_order(50, 7, 0)
    assert epoch_order(50, 7, 0) != epoch_order(50, 7, 1)
    assert epoch_order(50, 7, 0) != epoch_order(50, 8, 0)


def test_count_steps_by_hand():
    assert count_steps(100, 32, 1.0) == 4
    assert count_steps(100, 32, 0.5) == 2
    assert count_steps(100, 32, 3.0, max_steps=5) == 5
    assert count_steps(1, 32, 0.01) == 1


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_ranks_share_a_batch_without_loss_or_overlap(lengths, micro, world):
    batch = list(range(len(lengths)))[::-1]
    parts = [rank_slices(batch, lengths, BatchLimit(micro), rank, world) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1, "every rank: as many forwards"
    sizes = [len(rows) for part in parts for rows in part]
    assert max(sizes) <= micro
    assert max(sizes) - min(sizes) <= 1
    assert sorted(row for part in parts for rows in part for row in rows) == sorted(batch)


def test_rows_of_similar_length_meet():
    lengths = [9, 1, 8, 2, 10, 3, 7, 4]
    assert rank_slices(range(8), lengths, BatchLimit(2), rank=0, world_size=2) == [[1, 3], [6, 2]]
    assert rank_slices(range(8), lengths, BatchLimit(2), rank=1, world_size=2) == [[5, 7], [0, 4]]


def test_a_small_batch_is_spread_over_the_ranks():
    limit = BatchLimit(8)
    assert [len(rank_slices(range(8), [1] * 8, limit, r, 2)[0]) for r in range(2)] == [4, 4]


def test_fewer_rows_than_ranks_gives_empty_micro_batches():
    parts = [rank_slices([0], [5], BatchLimit(4), rank, 3) for rank in range(3)]
    assert sorted(parts) == [[[]], [[]], [[0]]]


def test_pad_rows():
    ids = pad_rows([[1, 2, 3], [4]], pad_id=9)
    assert torch.equal(ids, torch.tensor([[1, 2, 3], [4, 9, 9]]))
    assert pad_rows([[1, 2, 3]], 0, multiple=8).shape == (1, 8)
    assert pad_rows([[1, 2, 3]], 0, multiple=8, limit=6).shape == (1, 6)
    assert pad_rows([[1] * 8], 0, multiple=8).shape == (1, 8)
