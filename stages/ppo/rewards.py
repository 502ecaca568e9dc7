"""From scores and log-probs to per-token rewards. Pure functions.

Legend: B answers, T response tokens (actions). Masks: True = counts; the counted tokens of a
row are a prefix of it.
"""

from __future__ import annotations

from typing import Literal

import torch


def penalise_missing_eos(
    scores_B: torch.Tensor,
    stopped_B: torch.Tensor,
    *,
    mode: Literal["subtract", "replace", "ignore"],
    penalty: float,
) -> torch.Tensor:
    """Lower the score of answers that were cut by length.

    Args:
        scores_B: normalised, clipped scores.
        stopped_B: bool, the answer ends with a stop token.
        mode: subtract `penalty`, replace the score by `-penalty`, or leave it.
        penalty: size of the loss, >= 0.

    Returns:
        scores_B with the penalty applied.
    """
    if mode == "ignore":
        return scores_B
    cut_B = scores_B - penalty if mode == "subtract" else torch.full_like(scores_B, -penalty)
    return torch.where(stopped_B, scores_B, cut_B)


def penalise_length(
    scores_B: torch.Tensor, lengths_B: torch.Tensor, *, per_token: float
) -> torch.Tensor:
    """Lower each score by its answer's length, against answers that grow for their reward.

    Args:
        scores_B: with the missing-EOS rule applied.
        lengths_B: tokens of each answer, EOS included.
        per_token: what each token costs, >= 0.
    """
    return scores_B - per_token * lengths_B


def token_rewards(
    scores_B: torch.Tensor, kl_BT: torch.Tensor, mask_BT: torch.Tensor, *, kl_coef: float
) -> torch.Tensor:
    """r_t = -kl_coef * kl_t, with the score added on the last action token (EOS included).

    Args:
        scores_B: one score per answer.
        kl_BT: per-token KL estimates.
        mask_BT: bool, the action tokens; a row without any gets no score.
        kl_coef: weight of the penalty.

    Returns:
        fp32 rewards_BT, 0 outside the mask.
    """
    rewards_BT = torch.where(mask_BT, -kl_coef * kl_BT, 0.0)
    # By comparison and not by indices of the rows with actions: those must be read on the host.
    last_B1 = mask_BT.sum(dim=1, keepdim=True) - 1
    is_last_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device) == last_B1
    score_B1 = scores_B.to(rewards_BT.dtype).unsqueeze(1)
    return rewards_BT + torch.where(is_last_BT, score_B1, 0.0)
