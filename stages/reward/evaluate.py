"""Held-out accuracy, and the statistics that normalise scores later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_app.training.accumulate import check_evaluation
from rlhf_app.training.batching import rank_slices
from rlhf_app.training.distributed import Dist
from rlhf_app.training.micro_batches import BatchLimit
from stages.reward.batches import PairBatch
from stages.reward.loss import Sums

LossOfBatch = Callable[[PairBatch], tuple[torch.Tensor, Sums]]


@dataclass(frozen=True)
class Evaluation:
    """Means over a whole data set, the same on every rank.

    Attributes:
        loss: training loss per pair.
        accuracy: share of pairs whose chosen answer scores higher; 0.5 is chance.
        margin: mean of chosen minus rejected score.
        chosen: mean score of chosen answers.
        rejected: mean score of rejected answers.
        mean: of all scores.
        std: of all scores, population form.
    """

    loss: float
    accuracy: float
    margin: float
    chosen: float
    rejected: float
    mean: float
    std: float


def evaluate(
    engine: Any,
    lengths: Sequence[int],
    batch_of: Callable[[list[int]], PairBatch],
    loss_of: LossOfBatch,
    limit: BatchLimit,
    dist: Dist,
) -> Evaluation:
    """Scores held-out pairs, without updating anything.

    Args:
        engine: the DeepSpeed engine; put into eval mode and back.
        lengths: cost of each held-out pair in tokens.
        batch_of: row indices -> micro-batch.
        loss_of: the training loss.
        limit: of one forward.
        dist: this process's place.

    Raises:
        NonFiniteError: on every rank, when the loss or a score of any rank is not finite.
    """
    slices = rank_slices(range(len(lengths)), lengths, limit, dist.rank, dist.world_size)
    totals = torch.zeros(6, dtype=torch.float64, device=dist.device)
    engine.eval()
    with torch.no_grad():
        for rows in slices:
            loss_sum, sums = loss_of(batch_of(rows))
            totals += torch.stack([loss_sum.double(), *sums.values()])
    engine.train()
    means = [total / len(lengths) for total in dist.sum(totals.tolist())]
    loss, accuracy, margin, chosen, rejected, squares = means
    check_evaluation(
        {
            "loss": loss,
            "mean chosen score": chosen,
            "mean rejected score": rejected,
            "mean squared score": squares,
        }
    )
    mean = (chosen + rejected) / 2
    variance = max(0.0, squares / 2 - mean * mean)
    return Evaluation(loss, accuracy, margin, chosen, rejected, mean, math.sqrt(variance))
