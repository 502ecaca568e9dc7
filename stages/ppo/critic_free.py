"""Advantages without a critic: answers of one prompt compared with each other. Pure functions.

Legend: P prompts, K answers of each, B answers, T response tokens (actions). Masks: True = counts.
"""

from __future__ import annotations

import torch

from stages.ppo.advantages import gae

# Beside the standard deviation, as in TRL: a group of near-equal scores must not be blown up.
GROUP_EPS = 1e-4


def leave_one_out(rewards_PK: torch.Tensor) -> torch.Tensor:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): each reward minus the mean of the others.

    Args:
        rewards_PK: of whole answers, float; K at least 2.

    Returns:
        R_k - sum over j != k of R_j / (K - 1). The baseline does not depend on the answer itself,
        so the gradient stays unbiased.
    """
    others_PK = rewards_PK.sum(dim=1, keepdim=True) - rewards_PK
    return rewards_PK - others_PK / (rewards_PK.shape[1] - 1)


def group_relative(rewards_PK: torch.Tensor, eps: float = GROUP_EPS) -> torch.Tensor:
    """GRPO (Shao et al. 2024, arXiv:2402.03300): (R - mean of the group) / (its std + eps).

    Args:
        rewards_PK: of whole answers, float; K at least 2.
        eps: added to the standard deviation.

    Returns:
        As the rewards. The standard deviation is the sample's (K - 1), as in TRL and verl. A
        group of equal rewards comes out as 0.
    """
    centred_PK = minus_group_mean(rewards_PK)
    variance_P1 = centred_PK.square().sum(dim=1, keepdim=True) / (rewards_PK.shape[1] - 1)
    return centred_PK / (variance_P1.sqrt() + eps)


def minus_group_mean(rewards_PK: torch.Tensor) -> torch.Tensor:
    """Each reward minus the mean of its group, its own included."""
    return rewards_PK - rewards_PK.mean(dim=1, keepdim=True)


def reward_to_go(rewards_BT: torch.Tensor, mask_BT: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Discounted sum of the rewards from each token on: A_t = r_t + gamma * A_{t+1}.

    REINFORCE++ (Hu 2025, arXiv:2501.03262) whitens this over the whole batch.

    Args:
        rewards_BT: per-token rewards, fp32.
        mask_BT: bool, the action tokens.
        gamma: discount.

    Returns:
        fp32, 0 outside the mask.
    """
    nothing_BT = torch.zeros_like(rewards_BT)
    return gae(rewards_BT, nothing_BT, mask_BT, gamma=gamma, gae_lambda=1.0)[0]


def to_tokens(advantages_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """The advantage of a whole answer at each of its tokens, 0 outside the mask."""
    return torch.where(mask_BT, advantages_B.unsqueeze(1), 0.0)
