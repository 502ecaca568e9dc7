"""The actor's whole objective over one micro-batch.

Legend: B answers, T response tokens (actions).
"""

from __future__ import annotations

import torch

from rlhf_app.config.schema import PPOConfig
from stages.ppo.experience import Experience
from stages.ppo.kl import kl_loss
from stages.ppo.losses import Sums, policy_loss


def actor_objective(
    logprobs_BT: torch.Tensor,
    entropy_BT: torch.Tensor | None,
    batch: Experience,
    ppo: PPOConfig,
    *,
    kl_coef: float,
) -> tuple[torch.Tensor, Sums]:
    """Policy loss + kl_coef x KL, where that is a loss, - entropy_coef x entropy.

    Args:
        logprobs_BT: of the actions under the policy being trained, fp32.
        entropy_BT: of its distributions, with gradient; None without a bonus.
        batch: the micro-batch.
        ppo: settings.
        kl_coef: weight of the KL in this update.

    Returns:
        Sums over the micro-batch's action tokens: the loss, and those of `policy_loss`, with
        `kl_loss` where that is part of it.
    """
    mask_BT = batch.answers.action_mask_BT
    loss, sums = policy_loss(
        logprobs_BT,
        batch.old_logprobs_BT,
        batch.advantages_BT,
        mask_BT,
        clip_range=ppo.clip_range,
        log_ratio_clamp=ppo.log_ratio_clamp,
        dual_clip=ppo.dual_clip,
    )
    if ppo.kl_penalty == "loss":
        kl = kl_loss(
            logprobs_BT,
            batch.reference_BT,
            mask_BT,
            ppo.kl_estimator,
            log_ratio_clamp=ppo.log_ratio_clamp,
        )
        loss = loss + kl_coef * kl
        sums["kl_loss"] = kl.detach()
    if entropy_BT is not None:
        loss = loss - ppo.entropy_coef * torch.where(mask_BT, entropy_BT, 0.0).sum()
    return loss, sums
