"""Which of a rank's answers go through a forward together: in the update, and in scoring."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_app.config.schema import PPOConfig
from rlhf_app.training.distributed import Dist
from rlhf_app.training.micro_batches import BatchLimit, cut_rows, split_to

# Without gradients nothing is kept for a backward, so more rows fit. A CPU gains nothing.
_SCORED_AT_ONCE = 4


def update_batches(lengths: Sequence[int], ppo: PPOConfig, dist: Dist) -> list[list[int]]:
    """The micro-batches of the update, in which old log-probs are computed as well.

    Rows are sorted by length inside each mini-batch, whose rows stay what they were: the
    objective does not depend on the cut.

    Args:
        lengths: prompt + response tokens of this rank's answers, mini-batch after mini-batch.
        ppo: settings.
        dist: process group; every rank calls, with equally many answers.

    Returns:
        Rows of each micro-batch, none empty; the same number for each mini-batch, on every rank.
    """
    share = len(lengths) // ppo.mini_batches
    limit = BatchLimit(ppo.micro_batch_size, ppo.micro_batch_tokens)
    cuts = []
    for mini_batch in range(ppo.mini_batches):
        own = lengths[mini_batch * share : (mini_batch + 1) * share]
        cuts.append((mini_batch * share, own, cut_rows(own, limit)))
    count = dist.max(max(len(parts) for _, _, parts in cuts))
    # No rank has fewer rows than another has micro-batches, so halving always suffices.
    return [
        [first + row for row in part]
        for first, own, parts in cuts
        for part in split_to(parts, own, count)
    ]


def score_batches(lengths: Sequence[int], ppo: PPOConfig, dist: Dist) -> list[list[int]]:
    """Batches for forwards without gradients, over all of this rank's answers.

    Args:
        lengths: prompt + response tokens of this rank's answers.
        ppo: settings.
        dist: process group; every rank calls, with equally many answers.

    Returns:
        Rows of each batch, none empty; the same number on every rank.
    """
    parts = cut_rows(lengths, score_limit(ppo, dist))
    return split_to(parts, lengths, dist.max(len(parts)))


def score_limit(ppo: PPOConfig, dist: Dist) -> BatchLimit:
    """What one forward without gradients may hold on this device."""
    factor = _SCORED_AT_ONCE if dist.device.type == "cuda" else 1
    limit = BatchLimit(ppo.micro_batch_size, ppo.micro_batch_tokens).times(factor)
    if ppo.score_batch_tokens is not None:
        limit = BatchLimit(limit.rows, ppo.score_batch_tokens)
    return limit
