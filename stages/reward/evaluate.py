"""Held-out accuracy and quality, and the statistics that normalise scores later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_app.models.whole_rows import whole_rows
from rlhf_app.training.accumulate import check_evaluation
from rlhf_app.training.batching import rank_slices
from rlhf_app.training.distributed import Dist
from rlhf_app.training.error_phase import within
from rlhf_app.training.micro_batches import BatchLimit
from stages.reward.batches import PairBatch
from stages.reward.loss import Sums
from stages.reward.quality import Quality, quality, quality_sums

LossOfScores = Callable[[PairBatch, torch.Tensor], tuple[torch.Tensor, Sums]]


@dataclass(frozen=True, kw_only=True)
class Evaluation(Quality):
    """Means over a whole data set, the same on every rank; and what `Quality` holds.

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


@within("evaluation")
def evaluate(
    engine: Any,
    lengths: Sequence[int],
    batch_of: Callable[[list[int]], PairBatch],
    loss_of: LossOfScores,
    limit: BatchLimit,
    dist: Dist,
) -> Evaluation:
    """Scores held-out pairs, without updating anything.

    Args:
        engine: the DeepSpeed engine; put into eval mode and back.
        lengths: cost of each held-out pair in tokens.
        batch_of: row indices -> micro-batch.
        loss_of: the training loss, from the scores of every prefix.
        limit: of one forward.
        dist: this process's place.

    Raises:
        NonFiniteError: on every rank, when the loss or a score of any rank is not finite.
    """
    slices = rank_slices(range(len(lengths)), lengths, limit, dist.rank, dist.world_size)
    totals: Sums = {}
    engine.eval()
    with torch.no_grad(), whole_rows():
        for rows in slices:
            batch = batch_of(rows)
            scores_2BT = engine(batch.input_ids_2BT)
            loss_sum, sums = loss_of(batch, scores_2BT)
            sums = {"loss": loss_sum.double()} | sums
            chosen_B, rejected_B = batch.at_last(scores_2BT)
            chosen_tokens_B, rejected_tokens_B = batch.tokens_2B.chunk(2)
            sums |= quality_sums(
                chosen_B, rejected_B, chosen_tokens_B, rejected_tokens_B, batch.weight_B
            )
            totals = {name: total + totals.get(name, 0.0) for name, total in sums.items()}
    engine.train()
    totals = _over_ranks(totals, dist)
    count = len(lengths)
    loss, accuracy, margin, chosen, rejected, squares = (
        float(totals[name]) / count
        for name in ("loss", "correct", "margin", "chosen", "rejected", "squares")
    )
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
    return Evaluation(
        loss=loss,
        accuracy=accuracy,
        margin=margin,
        chosen=chosen,
        rejected=rejected,
        mean=mean,
        std=math.sqrt(variance),
        **vars(quality(totals)),
    )


def _over_ranks(sums: Mapping[str, torch.Tensor], dist: Dist) -> Sums:
    """Sums over all ranks, on the host, under the same names and in the same shapes."""
    flat = torch.cat([total.reshape(-1) for total in sums.values()])
    summed = torch.tensor(dist.sum(flat.tolist()), dtype=torch.float64)
    parts = summed.split([total.numel() for total in sums.values()])
    return {
        name: part.reshape(total.shape)
        for (name, total), part in zip(sums.items(), parts, strict=True)
    }
