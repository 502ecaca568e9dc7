"""Losses of the reward model. Shapes: B pairs, T positions.

All return a sum over pairs; the caller divides by the number of pairs of the whole batch.
Weights are 1 for a pair and 0 for a filler row that only keeps the ranks in step.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

Sums = dict[str, torch.Tensor]


def final_token_loss(
    chosen_B: torch.Tensor,
    rejected_B: torch.Tensor,
    margin_B: torch.Tensor,
    weight_B: torch.Tensor,
    center_coef: float = 0.0,
) -> tuple[torch.Tensor, Sums]:
    """-log sigmoid(r_c - r_r - margin) (Ouyang et al. 2022, eq. 1; margin: Touvron et al. 2023).

    Args:
        chosen_B: fp32 scores at the last token of the chosen answers.
        rejected_B: the same of the rejected ones.
        margin_B: fp32 lead demanded of the chosen score; 0 for none.
        weight_B: fp32, 1 or 0.
        center_coef: weight of (r_c + r_r)^2, which pulls scores to mean 0 (Eisenstein et al.
            2023); 0.01 is usual.

    Returns:
        (scalar, sums of `pair_sums`).
    """
    loss_B = -F.logsigmoid(chosen_B - rejected_B - margin_B)
    loss_B = loss_B + center_coef * (chosen_B + rejected_B).square()
    return (weight_B * loss_B).sum(), pair_sums(chosen_B, rejected_B, weight_B)


def token_wise_loss(
    chosen_BT: torch.Tensor,
    rejected_BT: torch.Tensor,
    chosen_last_B: torch.Tensor,
    rejected_last_B: torch.Tensor,
    first_B: torch.Tensor,
    margin_B: torch.Tensor,
    weight_B: torch.Tensor,
    center_coef: float = 0.0,
) -> tuple[torch.Tensor, Sums]:
    """DeepSpeed-Chat's loss: the pair loss at every position after the answers part, averaged.

    Deviation: DeepSpeed-Chat compares the longer answer with the padding of the shorter one;
    here the shorter answer keeps the score of its last token, so that only real tokens count.

    Args:
        chosen_BT: fp32 scores of every prefix of the chosen answers.
        rejected_BT: the same of the rejected ones.
        chosen_last_B: int64 index of the last token of the chosen answers.
        rejected_last_B: the same of the rejected ones.
        first_B: int64 first position at which the two differ, at most the larger last index.
        margin_B: as in `final_token_loss`.
        weight_B: fp32, 1 or 0.
        center_coef: as in `final_token_loss`, on the scores at the last tokens.

    Returns:
        (scalar, sums of `pair_sums` at the last tokens).
    """
    position_1T = torch.arange(chosen_BT.shape[1], device=chosen_BT.device).unsqueeze(0)
    longer_B = torch.maximum(chosen_last_B, rejected_last_B)
    counts_BT = (position_1T >= first_B.unsqueeze(1)) & (position_1T <= longer_B.unsqueeze(1))
    chosen_held_BT = chosen_BT.gather(1, position_1T.minimum(chosen_last_B.unsqueeze(1)))
    rejected_held_BT = rejected_BT.gather(1, position_1T.minimum(rejected_last_B.unsqueeze(1)))
    loss_BT = -F.logsigmoid(chosen_held_BT - rejected_held_BT - margin_B.unsqueeze(1))
    loss_B = (loss_BT * counts_BT).sum(1) / counts_BT.sum(1)
    chosen_B = chosen_BT.gather(1, chosen_last_B.unsqueeze(1)).squeeze(1)
    rejected_B = rejected_BT.gather(1, rejected_last_B.unsqueeze(1)).squeeze(1)
    loss_B = loss_B + center_coef * (chosen_B + rejected_B).square()
    return (weight_B * loss_B).sum(), pair_sums(chosen_B, rejected_B, weight_B)


def pair_sums(chosen_B: torch.Tensor, rejected_B: torch.Tensor, weight_B: torch.Tensor) -> Sums:
    """Sums over pairs that accuracy, margin, mean and variance are made of, detached.

    A tie is no correct ranking. Squares are summed in fp64, as the variance is their small
    difference to the squared mean.
    """
    chosen_B, rejected_B = chosen_B.detach().double(), rejected_B.detach().double()
    weight_B = weight_B.double()
    return {
        "correct": (weight_B * (chosen_B > rejected_B)).sum(),
        "margin": (weight_B * (chosen_B - rejected_B)).sum(),
        "chosen": (weight_B * chosen_B).sum(),
        "rejected": (weight_B * rejected_B).sum(),
        "squares": (weight_B * (chosen_B.square() + rejected_B.square())).sum(),
    }
