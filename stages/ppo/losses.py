"""The two PPO losses as pure functions (Schulman et al. 2017, arXiv:1707.06347).

Legend: B answers, T response tokens (actions). Masks: True = counts. Every function returns a
*sum* over counted tokens, so that the caller can divide by the token count of the whole
mini-batch over all ranks: the gradient then does not depend on how rows are cut up.
"""

from __future__ import annotations

import torch

Sums = dict[str, torch.Tensor]


def policy_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_range: float,
    log_ratio_clamp: float = 20.0,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Clipped surrogate: sum of max(-A * rho, -A * clip(rho, 1 - eps, 1 + eps)).

    Where A < 0 that grows with rho without bound; a dual clip c (Ye et al. 2020,
    arXiv:1912.09729) holds it at -A * c.

    Args:
        logprobs_BT: log-probs of the sampled tokens under the policy being trained, fp32.
        old_logprobs_BT: the same under the policy that sampled, no gradient.
        advantages_BT: fp32, already whitened where wanted.
        mask_BT: bool, the action tokens.
        clip_range: eps.
        log_ratio_clamp: |log rho| is clamped here so that one outlier cannot overflow exp.
        dual_clip: c, above 1; None: no bound.

    Returns:
        The loss sum (scalar, with gradient) and detached sums over the same tokens: `clipped`
        (tokens where a clipped branch is the active one), `approx_kl` (Schulman's k3
        estimator of KL(old || new), non-negative) and `ratio`.
    """
    # Padding holds arbitrary numbers; zero its difference first, so that it can neither
    # overflow nor send a gradient.
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0.0)
    log_ratio_BT = log_ratio_BT.clamp(-log_ratio_clamp, log_ratio_clamp)
    ratio_BT = log_ratio_BT.exp()
    unclipped_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1.0 - clip_range, 1.0 + clip_range)
    held_BT = clipped_BT > unclipped_BT
    surrogate_BT = torch.maximum(unclipped_BT, clipped_BT)
    if dual_clip is not None:
        bound_BT = torch.where(advantages_BT < 0, -advantages_BT * dual_clip, float("inf"))
        held_BT = held_BT | (surrogate_BT > bound_BT)
        surrogate_BT = torch.minimum(surrogate_BT, bound_BT)
    loss = torch.where(mask_BT, surrogate_BT, 0.0).sum()
    with torch.no_grad():
        k3_BT = ratio_BT - 1.0 - log_ratio_BT
        sums = {
            "clipped": (held_BT & mask_BT).sum().float(),
            "approx_kl": torch.where(mask_BT, k3_BT, 0.0).sum(),
            "ratio": torch.where(mask_BT, ratio_BT, 0.0).sum(),
        }
    return loss, sums


def value_loss(
    values_BT: torch.Tensor,
    old_values_BT: torch.Tensor,
    returns_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_range: float,
) -> tuple[torch.Tensor, Sums]:
    """Clipped squared error: sum of 0.5 * max((V - R)^2, (clip(V, V_old +- c) - R)^2).

    Args:
        values_BT: the critic's values now, fp32.
        old_values_BT: its values when the rollout was scored, no gradient.
        returns_BT: advantages + old values, before whitening.
        mask_BT: bool, the action tokens.
        clip_range: c.

    Returns:
        The loss sum (scalar, with gradient) and detached sums: `value_clipped`.
    """
    # A masked square would still send NaN: 0 times what the padding holds.
    values_BT, old_values_BT, returns_BT = (
        torch.where(mask_BT, numbers_BT, 0.0)
        for numbers_BT in (values_BT, old_values_BT, returns_BT)
    )
    # Not old + (change clamped): that rounds, and would count as clipped what is not.
    shifted_BT = values_BT.clamp(old_values_BT - clip_range, old_values_BT + clip_range)
    error_BT = (values_BT - returns_BT) ** 2
    clipped_error_BT = (shifted_BT - returns_BT) ** 2
    loss = 0.5 * torch.where(mask_BT, torch.maximum(error_BT, clipped_error_BT), 0.0).sum()
    with torch.no_grad():
        sums = {"value_clipped": ((clipped_error_BT > error_BT) & mask_BT).sum().float()}
    return loss, sums
