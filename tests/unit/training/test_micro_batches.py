"""Micro-batches under a limit, against tables worked by hand and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_app.training.batching import rank_slices
from rlhf_app.training.micro_batches import BatchLimit, computed_tokens, cut_rows, split_to

LENGTHS = [5, 9, 2, 7, 3, 3]  # longest first: rows 1 3 0 4 5 2


@pytest.mark.parametrize(
    ("limit", "parts"),
    [
        (BatchLimit(2), [[1, 3], [0, 4], [5, 2]]),
        (BatchLimit(4), [[1, 3, 0, 4], [5, 2]]),
        # 2 x 9 fit into 18, then 3 x 5, then the row that is left.
        (BatchLimit(1, 18), [[1, 3], [0, 4, 5], [2]]),
        # 9 does not fit and is alone, as 7 is; 5; 2 x 3; 2.
        (BatchLimit(1, 8), [[1], [3], [0], [4, 5], [2]]),
        (BatchLimit(1, 54), [[1, 3, 0, 4, 5, 2]]),
    ],
)
def test_cuts_by_hand(limit, parts):
    assert cut_rows(LENGTHS, limit) == parts


def test_the_costliest_is_halved_first():
    parts = [[1, 3], [0, 4, 5, 2]]  # 2 x 9 = 18 tokens, 4 x 5 = 20
    assert split_to(parts, LENGTHS, 3) == [[1, 3], [0, 4], [5, 2]]
    assert split_to(parts, LENGTHS, 4) == [[1], [3], [0, 4], [5, 2]]
    assert split_to(parts, LENGTHS, 7) == [[1], [3], [0], [4], [5], [2], []]


def test_computed_tokens_by_hand():
    assert computed_tokens([[1, 3], [0, 4, 5], [2], []], LENGTHS) == 2 * 9 + 3 * 5 + 2


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=50),
    st.integers(1, 200),
    st.integers(0, 10),
)
def test_every_row_is_in_one_micro_batch_within_the_limit(lengths, tokens, more):
    parts = cut_rows(lengths, BatchLimit(1, tokens))
    count = len(parts) + more
    split = split_to(parts, lengths, count)
    assert len(split) == count
    assert sum(map(len, split)) == len(lengths)
    assert {row for part in split for row in part} == set(range(len(lengths)))
    for part in filter(None, [*parts, *split]):
        assert len(part) == 1 or len(part) * max(lengths[row] for row in part) <= tokens
    # Empty ones only where rows have run out.
    assert not (any(not part for part in split) and any(len(part) > 1 for part in split))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 200),
    st.integers(1, 5),
)
def test_ranks_share_a_batch_under_a_token_budget(lengths, tokens, world):
    batch = list(range(len(lengths)))[::-1]
    limit = BatchLimit(1, tokens)
    parts = [rank_slices(batch, lengths, limit, rank, world) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1, "every rank: as many forwards"
    assert sorted(row for part in parts for rows in part for row in rows) == sorted(batch)
    for rows in filter(None, (rows for part in parts for rows in part)):
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= tokens
