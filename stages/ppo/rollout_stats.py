"""Sums over one rollout batch, and the means that go to the metrics file.

Legend: B answers, T response tokens (actions).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.distributed import Dist
from stages.ppo.advantages import moments
from stages.ppo.experience import Answers


class RolloutStats:
    """Adds up micro-batches on this rank; `means` adds up the ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._max_logprob_gap = 0.0

    def add_scores(
        self,
        answers: Answers,
        *,
        sampled_logprobs: Sequence[torch.Tensor],
        stopped: Sequence[bool],
        old_BT: torch.Tensor,
        kl_BT: torch.Tensor,
        entropy_BT: torch.Tensor,
        scores_B: torch.Tensor,
    ) -> None:
        """Add one scored micro-batch.

        Args:
            answers: the layout.
            sampled_logprobs: per answer, the log-probs that the rollout returned.
            stopped: per answer, whether it ends with a stop token.
            old_BT: log-probs of the same tokens by the training forward.
            kl_BT: per-token KL to the reference, 0 where padded.
            entropy_BT: per-token entropy, nats.
            scores_B: final scores.
        """
        mask_BT = answers.action_mask_BT
        sampled_BT = torch.zeros_like(old_BT)
        for row, logprobs in enumerate(sampled_logprobs):
            sampled_BT[row, : len(logprobs)] = logprobs.to(old_BT.device)
        gap_BT = torch.where(mask_BT, (sampled_BT - old_BT).abs(), 0.0)
        self._add(
            answers=len(answers),
            tokens=answers.num_actions,
            score=float(scores_B.double().sum()),
            score_squares=float((scores_B.double() ** 2).sum()),
            kl=float(kl_BT.sum()),
            entropy=float(torch.where(mask_BT, entropy_BT, 0.0).sum()),
            stopped=sum(stopped),
            logprob_gap=float(gap_BT.sum()),
        )
        self._max_logprob_gap = max(self._max_logprob_gap, float(gap_BT.max()))

    def add_returns(
        self, returns_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> None:
        """Add what explained variance needs: moments of the returns and of their residuals."""
        _, total, squares = moments(returns_BT, mask_BT)
        _, residual, residual_squares = moments(returns_BT - values_BT, mask_BT)
        self._add(
            returns=total,
            return_squares=squares,
            residual=residual,
            residual_squares=residual_squares,
        )

    def _add(self, **sums: float) -> None:
        for name, value in sums.items():
            self._sums[name] += value

    def check_finite(self, dist: Dist) -> None:
        """Stop before the update where a score or log-prob is not finite.

        Raises:
            NonFiniteError: on every rank, when any rank holds such a number.
        """
        names = ("score", "kl", "entropy", "logprob_gap")
        bad = [float(not math.isfinite(self._sums[name])) for name in names]
        for name, count in zip(names, dist.sum(bad), strict=True):
            if count:
                raise NonFiniteError(
                    f"non-finite {name} in the rollout on {int(count)} of {dist.world_size} "
                    "rank(s): nothing was updated. Check the reward model, or lower the "
                    "learning rate"
                )

    def means(self, dist: Dist) -> dict[str, float]:
        """Means over all ranks' answers and tokens, under their documented metric names."""
        names = sorted(self._sums)
        sums = dict(zip(names, dist.sum([self._sums[n] for n in names]), strict=True))
        answers, tokens = sums["answers"], max(sums["tokens"], 1.0)
        reward = sums["score"] / answers
        return_variance = sums["return_squares"] / tokens - (sums["returns"] / tokens) ** 2
        residual_variance = sums["residual_squares"] / tokens - (sums["residual"] / tokens) ** 2
        return {
            "reward": reward,
            "reward_std": max(sums["score_squares"] / answers - reward**2, 0.0) ** 0.5,
            "kl_per_answer": sums["kl"] / answers,
            "entropy": sums["entropy"] / tokens,
            "answer_length": tokens / answers,
            "eos_rate": sums["stopped"] / answers,
            "explained_variance": 1.0 - residual_variance / max(return_variance, 1e-12),
            "logprob_gap_mean": sums["logprob_gap"] / tokens,
            "logprob_gap_max": max(dist.gather_objects(self._max_logprob_gap)),
            "answers": answers,
            "tokens": tokens,
        }
