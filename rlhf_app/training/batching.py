"""Which rows make up which optimizer step, and which rank takes which of them.

Everything follows from (number of rows, seed, epoch) alone, so that all ranks agree without
talking, a resumed run continues in the middle, and each row is used once per epoch.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence

import torch

from rlhf_app.training.micro_batches import BatchLimit, cut_rows, split_to


def epoch_order(rows: int, seed: int, epoch: int) -> array[int]:
    """A permutation of the rows, another one each epoch.

    Args:
        rows: number of rows.
        seed: the run's seed.
        epoch: counted from 0.
    """
    order = array("q", range(rows))  # 8 bytes a row
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def count_steps(rows: int, batch_size: int, epochs: float, max_steps: int | None = None) -> int:
    """Optimizer steps of a stage, at least 1; the last batch of an epoch may be smaller."""
    steps = max(1, round(epochs * math.ceil(rows / batch_size)))
    return steps if max_steps is None else min(steps, max_steps)


def batches(
    rows: int,
    batch_size: int,
    seed: int,
    total_steps: int,
    *,
    shuffled: bool = True,
    done: int = 0,
) -> Iterator[list[int]]:
    """Yields the row indices of each optimizer step, over all ranks.

    Args:
        rows: number of rows, at least 1.
        batch_size: rows per step.
        seed: the run's seed.
        total_steps: number of batches to yield.
        shuffled: in another order each epoch; else from the first to the last.
        done: batches that were used before an interruption, and are left out.
    """
    assert rows > 0
    step = done
    first_epoch, used = divmod(done, math.ceil(rows / batch_size))
    for epoch in range(first_epoch, total_steps):
        order = epoch_order(rows, seed, epoch) if shuffled else range(rows)
        for start in range(used * batch_size if epoch == first_epoch else 0, rows, batch_size):
            if step == total_steps:
                return
            yield list(order[start : start + batch_size])
            step += 1


def rank_slices(
    batch: Sequence[int],
    lengths: Sequence[int],
    limit: BatchLimit,
    rank: int,
    world_size: int,
) -> list[list[int]]:
    """This rank's micro-batches of one batch.

    Rows of similar length share a micro-batch (little padding), and micro-batches of similar
    length run at the same time on different ranks (little waiting). Under a limit of rows, sizes
    differ by at most one row. Each rank gets the same number of micro-batches: where rows are
    fewer than ranks, some are empty and the rank runs one row with weight 0 in their place.

    Args:
        batch: row indices of the whole step.
        lengths: tokens of every row of the data set.
        limit: of one micro-batch.
        rank: this rank.
        world_size: number of ranks.

    Returns:
        Lists of row indices, possibly empty ones.
    """
    by_length = sorted(batch, key=lambda row: (lengths[row], row))
    if limit.tokens is not None:
        sizes = [lengths[row] for row in by_length]
        parts = cut_rows(sizes, limit)
        slots = math.ceil(len(parts) / world_size) * world_size
        shares = split_to(parts, sizes, slots)[rank::world_size]
        return [[by_length[place] for place in share] for share in shares]
    slots = math.ceil(len(batch) / (limit.rows * world_size)) * world_size
    # Cut points that spread the remainder evenly.
    cuts = [len(by_length) * slot // slots for slot in range(slots + 1)]
    mine = range(rank, slots, world_size)
    return [by_length[cuts[slot] : cuts[slot + 1]] for slot in mine]


def pad_rows(
    rows: Sequence[Sequence[int]], pad_id: int, multiple: int = 1, limit: int | None = None
) -> torch.Tensor:
    """Puts rows of ids into one tensor, left-aligned and padded on the right.

    Args:
        rows: token ids, at least one row.
        pad_id: any id; causal attention keeps what comes before from seeing it.
        multiple: round the width up to a multiple of this, for tensor cores.
        limit: but not beyond this (the model's positions).

    Returns:
        int64 (rows, width).
    """
    longest = max(len(row) for row in rows)
    width = -(-longest // multiple) * multiple
    if limit is not None:
        width = max(longest, min(width, limit))
    return torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows])
