"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438) and whitening.

Legend: B answers, T response tokens (actions). Masks: True = counts; the counted tokens of a
row are a prefix of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gae(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns over the action tokens.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lambda * A_{t+1}. V_t is read
    where action t is predicted. The value after the last action is 0, also for an answer cut
    by length: the score is the whole future.

    Args:
        rewards_BT: per-token rewards, fp32.
        values_BT: critic values, fp32.
        mask_BT: bool, the action tokens.
        gamma: discount.
        gae_lambda: 0 gives one-step TD errors, 1 gives discounted reward-to-go minus V.

    Returns:
        (advantages_BT, returns_BT), fp32, 0 outside the mask; returns = advantages + values.
    """
    # Padding may hold anything, NaN included: multiply-by-mask would keep the NaN.
    rewards_BT = torch.where(mask_BT, rewards_BT, 0.0)
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    advantages_BT = torch.zeros_like(rewards_BT)
    following_B = torch.zeros_like(rewards_BT[:, 0])
    next_value_B = torch.zeros_like(rewards_BT[:, 0])
    for t in reversed(range(rewards_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        following_B = torch.where(mask_BT[:, t], delta_B + gamma * gae_lambda * following_B, 0.0)
        advantages_BT[:, t] = following_B
        next_value_B = values_BT[:, t]
    return advantages_BT, advantages_BT + values_BT


def moments(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """fp64 [count, sum, sum of squares] of the counted entries, to add over ranks."""
    counted_BT = torch.where(mask_BT, values_BT, 0.0).double()
    return torch.stack([mask_BT.sum().double(), counted_BT.sum(), counted_BT.square().sum()])


def scale_to_unit_std(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, summed_moments: Sequence[float]
) -> torch.Tensor:
    """(x - mean) / (std + 1e-8) + mean: rewards of unit spread whose mean stays what it was.

    Moving the mean to 0 as well would give each token a reward or a cost for being there, and so
    change what a long answer is worth against a short one.

    Args:
        values_BT: fp32.
        mask_BT: bool.
        summed_moments: `moments` added over every rank, on the host.

    Returns:
        fp32, 0 outside the mask.
    """
    count, total, _ = summed_moments
    mean = total / max(count, 1.0)
    return torch.where(mask_BT, whiten(values_BT, mask_BT, summed_moments) + mean, 0.0)


def whiten(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, summed_moments: Sequence[float]
) -> torch.Tensor:
    """(x - mean) / (std + 1e-8) with the population moments of the whole batch.

    Args:
        values_BT: fp32.
        mask_BT: bool.
        summed_moments: `moments` added over every rank, on the host.

    Returns:
        fp32, 0 outside the mask. A batch of one token comes out as 0.
    """
    count, total, squares = summed_moments
    mean = total / max(count, 1.0)
    std = max(squares / max(count, 1.0) - mean * mean, 0.0) ** 0.5
    return torch.where(mask_BT, (values_BT - mean) / (std + 1e-8), 0.0)
