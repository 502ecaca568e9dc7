"""Cutting rows into micro-batches with little padding: by number of rows, or by tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """What one forward may hold.

    Attributes:
        rows: most rows; counts only where `tokens` is None.
        tokens: most tokens, padding included: rows x the longest of them. A row that is longer
            by itself is a micro-batch alone.
    """

    rows: int
    tokens: int | None = None

    def times(self, factor: int) -> BatchLimit:
        """A limit that is `factor` times as large."""
        return BatchLimit(self.rows * factor, self.tokens and self.tokens * factor)


def cut_rows(lengths: Sequence[int], limit: BatchLimit) -> list[list[int]]:
    """Cuts rows into micro-batches of neighbours in length, the longest first.

    The longest come first so that memory is at its peak at once, and not after an hour.

    Args:
        lengths: tokens of each row.
        limit: of each micro-batch.

    Returns:
        Indices of the rows of each micro-batch, none of them empty. Every row is in one.
    """
    parts: list[list[int]] = []
    room = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not room:
            parts.append([])
            room = limit.rows
            if limit.tokens is not None:
                room = max(1, limit.tokens // max(1, lengths[row]))
        parts[-1].append(row)
        room -= 1
    return parts


def split_to(parts: Sequence[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Halves micro-batches until there are `count`: ranks in step need equally many.

    Args:
        parts: what `cut_rows` returned, at most `count` of them.
        lengths: tokens of each row.
        count: how many are wanted.

    Returns:
        `count` lists, the longest rows first. Where rows run out, empty ones are last.
    """
    assert len(parts) <= count
    # The costliest is halved first, so that no step is much longer than the others.
    queue = [(-len(part) * lengths[part[0]], part) for part in parts if len(part) > 1]
    done = [part for part in parts if len(part) == 1]
    heapq.heapify(queue)
    while queue and len(queue) + len(done) < count:
        _, part = heapq.heappop(queue)
        for half in (part[: len(part) // 2], part[len(part) // 2 :]):
            if len(half) > 1:
                heapq.heappush(queue, (-len(half) * lengths[half[0]], half))
            else:
                done.append(half)
    whole = sorted([*done, *(part for _, part in queue)], key=lambda part: -lengths[part[0]])
    return whole + [[] for _ in range(count - len(whole))]


def computed_tokens(parts: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Tokens that forwards over these micro-batches compute, padding included."""
    return sum(len(part) * max(lengths[row] for row in part) for part in parts if part)
