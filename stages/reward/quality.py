"""What accuracy does not say of a reward model: is it calibrated, does it judge by length?

Shapes: B pairs. All sums add up over micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlhf_app.training.correlation import correlation

#: Of equal width over confidences from 0.5 to 1.
BINS = 10


@dataclass(frozen=True)
class Quality:
    """Over a whole data set of pairs; None where there is no pair to tell.

    Attributes:
        calibration: expected calibration error (Guo et al. 2017, arXiv:1706.04599): mean over
            pairs of abs(accuracy - confidence) of the pair's bin. The confidence in the answer
            with the higher score is sigmoid(abs(margin)).
        accuracy_chosen_longer: accuracy over pairs whose chosen answer is the longer one.
        accuracy_chosen_shorter: the same where it is the shorter one.
        longer_wins: accuracy of always preferring the longer answer; equal lengths count half.
        shorter_wins: of the shorter one.
        score_length_correlation: Pearson's, over all answers.
    """

    calibration: float
    accuracy_chosen_longer: float | None
    accuracy_chosen_shorter: float | None
    longer_wins: float
    shorter_wins: float
    score_length_correlation: float | None


def quality_sums(
    chosen_B: torch.Tensor,
    rejected_B: torch.Tensor,
    chosen_tokens_B: torch.Tensor,
    rejected_tokens_B: torch.Tensor,
    weight_B: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """fp64 sums for `quality`: scalars, and (BINS,) for calibration.

    Args:
        chosen_B: scores of the chosen answers.
        rejected_B: of the rejected ones.
        chosen_tokens_B: lengths of the chosen answers.
        rejected_tokens_B: of the rejected ones.
        weight_B: 1 for a pair, 0 for a filler row.
    """
    weight_B = weight_B.double()
    scores_2B = torch.cat([chosen_B, rejected_B]).double()
    tokens_2B = torch.cat([chosen_tokens_B, rejected_tokens_B]).double()
    weight_2B = weight_B.repeat(2)
    margin_B = chosen_B.double() - rejected_B.double()
    correct_B = weight_B * (margin_B > 0)
    longer_B = (chosen_tokens_B > rejected_tokens_B).double()
    shorter_B = (chosen_tokens_B < rejected_tokens_B).double()
    # A number that is not finite belongs to no bin; the evaluation refuses it later.
    confidence_B = margin_B.abs().sigmoid().nan_to_num(nan=0.5)
    bin_B = ((confidence_B - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    # The pair's label is right with a tie as often as a coin is.
    right_B = correct_B + 0.5 * weight_B * (margin_B == 0)
    bins = torch.zeros(BINS, dtype=torch.float64, device=chosen_B.device)
    return {
        "bin_confidence": bins.index_add(0, bin_B, weight_B * confidence_B),
        "bin_right": bins.index_add(0, bin_B, right_B),
        "pairs": weight_B.sum(),
        "longer": (weight_B * longer_B).sum(),
        "shorter": (weight_B * shorter_B).sum(),
        "correct_longer": (correct_B * longer_B).sum(),
        "correct_shorter": (correct_B * shorter_B).sum(),
        "scores": (weight_2B * scores_2B).sum(),
        "score_squares": (weight_2B * scores_2B.square()).sum(),
        "tokens": (weight_2B * tokens_2B).sum(),
        "token_squares": (weight_2B * tokens_2B.square()).sum(),
        "score_tokens": (weight_2B * scores_2B * tokens_2B).sum(),
    }


def quality(sums: Mapping[str, torch.Tensor]) -> Quality:
    """The numbers from the sums of `quality_sums` over all micro-batches and ranks."""
    bin_errors = (sums["bin_right"] - sums["bin_confidence"]).abs()
    s = {name: float(total) for name, total in sums.items() if total.ndim == 0}
    longer_wins = (s["longer"] + 0.5 * (s["pairs"] - s["longer"] - s["shorter"])) / s["pairs"]
    with_length = correlation(
        2 * s["pairs"],
        s["scores"],
        s["tokens"],
        s["score_squares"],
        s["token_squares"],
        s["score_tokens"],
    )
    return Quality(
        calibration=float(bin_errors.sum()) / s["pairs"],
        accuracy_chosen_longer=_share(s["correct_longer"], s["longer"]),
        accuracy_chosen_shorter=_share(s["correct_shorter"], s["shorter"]),
        longer_wins=longer_wins,
        shorter_wins=1.0 - longer_wins,
        score_length_correlation=None if math.isnan(with_length) else with_length,
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
