"""Sums over one rollout batch, and the means that go to the metrics file.

Legend: N answers of this rank, T response tokens (actions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.correlation import correlation
from rlhf_app.training.distributed import Dist
from stages.ppo.advantages import moments


@dataclass(frozen=True)
class ScoredAnswers:
    """What scoring found for all answers of this rank, on the device.

    Attributes:
        mask_NT: bool, the actions.
        sampled_NT: fp32 log-probs that the rollout returned.
        old_NT: fp32 log-probs of the same tokens by the training forward.
        reference_NT: fp32, by the reference.
        entropy_NT: fp32 nats.
        values_NT: fp32 critic values; None without a critic.
        scores_N: fp32 final scores.
    """

    mask_NT: torch.Tensor
    sampled_NT: torch.Tensor
    old_NT: torch.Tensor
    reference_NT: torch.Tensor
    entropy_NT: torch.Tensor
    values_NT: torch.Tensor | None
    scores_N: torch.Tensor


def rollout_sums(
    scored: ScoredAnswers, kl_NT: torch.Tensor, returns_NT: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """fp64 scalars on the device, for `RolloutStats`.

    Args:
        scored: what scoring found.
        kl_NT: per-token KL to the reference (k1), 0 where padded.
        returns_NT: 0 where padded; None without a critic.
    """
    mask_NT = scored.mask_NT
    gap_NT = torch.where(mask_NT, (scored.sampled_NT - scored.old_NT).abs(), 0.0)
    scores_N = scored.scores_N.double()
    lengths_N = mask_NT.sum(dim=1).double()
    sums = {
        "score": scores_N.sum(),
        "score_squares": scores_N.square().sum(),
        "length_squares": lengths_N.square().sum(),
        "score_lengths": (scores_N * lengths_N).sum(),
        "kl": kl_NT.double().sum(),
        "entropy": torch.where(mask_NT, scored.entropy_NT, 0.0).double().sum(),
        "logprob_gap": gap_NT.double().sum(),
        "max_logprob_gap": gap_NT.max().double(),
    }
    if returns_NT is None or scored.values_NT is None:
        return sums
    # Explained variance needs the moments of the returns and of their residuals.
    _, returns, return_squares = moments(returns_NT, mask_NT)
    _, residual, residual_squares = moments(returns_NT - scored.values_NT, mask_NT)
    return sums | {
        "value": torch.where(mask_NT, scored.values_NT, 0.0).double().sum(),
        "returns": returns,
        "return_squares": return_squares,
        "residual": residual,
        "residual_squares": residual_squares,
    }


@dataclass(frozen=True)
class RolloutStats:
    """Sums over this rank's answers; `means` adds up the ranks.

    Attributes:
        sums: those of `rollout_sums`, read; and of what the host knows: `answers`, `tokens`,
            `stopped`, `row_tokens` (prompts and answers) and `computed_tokens` (with the padding
            that the update's forwards compute).
    """

    sums: dict[str, float] = field(default_factory=dict)

    def check_finite(self, dist: Dist) -> None:
        """Stop before the update where a score, value or log-prob is not finite.

        Raises:
            NonFiniteError: on every rank, when any rank holds such a number.
        """
        # The same on every rank, critic or not: each waits for the others' numbers.
        names = ("score", "value", "kl", "entropy", "logprob_gap")
        bad = [float(not math.isfinite(self.sums.get(name, 0.0))) for name in names]
        for name, count in zip(names, dist.sum(bad), strict=True):
            if count:
                raise NonFiniteError(
                    f"non-finite {name} in the rollout on {int(count)} of {dist.world_size} "
                    "rank(s): nothing was updated. Check the reward model, or lower the "
                    "learning rate"
                )

    def means(self, dist: Dist) -> dict[str, float]:
        """Means over all ranks' answers and tokens, under their documented metric names."""
        names = sorted(self.sums)
        sums = dict(zip(names, dist.sum([self.sums[n] for n in names]), strict=True))
        answers, tokens = sums["answers"], max(sums["tokens"], 1.0)
        reward = sums["score"] / answers
        return {
            "reward": reward,
            "reward_std": max(sums["score_squares"] / answers - reward**2, 0.0) ** 0.5,
            "kl_per_answer": sums["kl"] / answers,
            "entropy": sums["entropy"] / tokens,
            "answer_length": tokens / answers,
            "eos_rate": sums["stopped"] / answers,
            "reward_length_correlation": correlation(
                answers,
                sums["score"],
                sums["tokens"],
                sums["score_squares"],
                sums["length_squares"],
                sums["score_lengths"],
            ),
            **_explained_variance(sums, tokens),
            "logprob_gap_mean": sums["logprob_gap"] / tokens,
            "logprob_gap_max": max(dist.gather_objects(self.sums["max_logprob_gap"])),
            "padding_share": 1.0 - sums["row_tokens"] / sums["computed_tokens"],
            "answers": answers,
            "tokens": tokens,
        }


def _explained_variance(sums: dict[str, float], tokens: float) -> dict[str, float]:
    """Of the critic's values; nothing where there is none."""
    if "returns" not in sums:
        return {}
    of_returns = sums["return_squares"] / tokens - (sums["returns"] / tokens) ** 2
    of_residuals = sums["residual_squares"] / tokens - (sums["residual"] / tokens) ** 2
    return {"explained_variance": 1.0 - of_residuals / max(of_returns, 1e-12)}
