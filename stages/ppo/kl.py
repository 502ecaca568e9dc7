"""Estimates of the KL to the reference, its loss, and the coefficient of the penalty.

Legend: B answers, T response tokens (actions). Masks: True = counts.
"""

from __future__ import annotations

from typing import Literal

import torch

from rlhf_app.config.schema import PPOConfig

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_ratio_BT: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Per-token estimates of KL(pi || pi_ref) from tokens that pi sampled (Schulman 2020,
    joschu.net/blog/kl-approx.html).

    With d = log pi - log pi_ref: k1 = d is unbiased, and negative for some tokens; k2 = d^2 / 2
    is biased and of low variance; k3 = exp(-d) - 1 + d is unbiased and never negative.

    Args:
        log_ratio_BT: d, float.
        estimator: which of them.

    Returns:
        As the input, nats, with gradient where it has one.
    """
    if estimator == "k1":
        return log_ratio_BT
    if estimator == "k2":
        return 0.5 * log_ratio_BT.square()
    # expm1 keeps the digits where the policies are near each other.
    return torch.expm1(-log_ratio_BT) + log_ratio_BT


def kl_penalty(
    log_ratio_BT: torch.Tensor, estimator: Estimator, *, clamp: float | None
) -> torch.Tensor:
    """Estimates for a penalty in the reward.

    Args:
        log_ratio_BT: log pi - log pi_ref, no gradient.
        estimator: see `kl_estimate`.
        clamp: most nats of a token, of either sign, so that one cannot drown a batch; or None.
    """
    estimates_BT = kl_estimate(log_ratio_BT, estimator)
    return estimates_BT if clamp is None else estimates_BT.clamp(-clamp, clamp)


def kl_loss(
    logprobs_BT: torch.Tensor,
    reference_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    estimator: Estimator,
    *,
    log_ratio_clamp: float,
) -> torch.Tensor:
    """Sum of the estimates over the counted tokens, with gradient (Shao et al. 2024 use k3).

    k1 is of no use here: the mean of its gradient is 0. That of k2 is the gradient of the KL.

    Args:
        logprobs_BT: under the policy being trained, fp32.
        reference_BT: under the reference, no gradient.
        mask_BT: bool, the action tokens.
        estimator: k2 or k3.
        log_ratio_clamp: |log ratio| is clamped here so that one outlier cannot overflow exp.
    """
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - reference_BT, 0.0)
    return kl_estimate(log_ratio_BT.clamp(-log_ratio_clamp, log_ratio_clamp), estimator).sum()


class KLController:
    """The weight of the KL penalty, update by update.

    Fixed, or adaptive (Ziegler et al. 2019, arXiv:1909.08593, section 2.2): with n answers an
    update, err = clip(kl / target - 1, -0.2, 0.2); coef *= 1 + err * n / horizon.

    Args:
        coef: at the start.
        target: nats per answer: summed over its tokens, mean over all answers; None: fixed.
        horizon: answers; a larger one follows more slowly.
    """

    def __init__(self, coef: float, *, target: float | None, horizon: float) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    @classmethod
    def of(cls, ppo: PPOConfig) -> KLController:
        """As the settings say."""
        target = ppo.kl_target if ppo.kl_controller == "adaptive" else None
        return cls(ppo.kl_coef, target=target, horizon=ppo.kl_horizon)

    def update(self, kl_per_answer: float, answers: float) -> None:
        """Take an update's KL into account.

        Args:
            kl_per_answer: k1, nats, summed over tokens, mean over answers of all ranks.
            answers: of all ranks.
        """
        if self._target is not None:
            error = min(max(kl_per_answer / self._target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * answers / self._horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self.coef = state["coef"]
