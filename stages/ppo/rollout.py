"""From prompts to experience: sample, score, and compute advantages.

Legend: B answers, T response tokens (actions).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from data_sources.examples import PromptExample
from rlhf_app.config.schema import PPOConfig
from rlhf_app.hybrid_engine import Rollout, SamplingParams
from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.distributed import Dist
from stages.ppo.advantages import gae, moments, whiten
from stages.ppo.experience import Answers, Experience, lay_out
from stages.ppo.logprobs import score_policy
from stages.ppo.models import PPOModels
from stages.ppo.rewards import k1, token_rewards


@dataclass
class RolloutBatch:
    """The experience of one update on this rank, with sums for the log."""

    experience: list[Experience] = field(default_factory=list)
    generate_seconds: float = 0.0
    score_seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    max_logprob_gap: float = 0.0

    def add(self, **sums: float) -> None:
        """Add to the sums over answers or tokens."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value


def sampling_params(models: PPOModels, ppo: PPOConfig, *, seed: int, step: int) -> SamplingParams:
    """How answers are sampled, in rollouts and in evaluation alike."""
    return SamplingParams(
        max_new_tokens=ppo.max_response_length,
        temperature=ppo.temperature,
        stop_ids=tuple(models.chat_format.stop_ids) if ppo.stop_at_eos else (),
        suppress_ids=models.suppress_ids,
        seed=seed,
        step=step,
    )


def collect(
    models: PPOModels,
    prompts: Sequence[PromptExample],
    uids: Sequence[int],
    ppo: PPOConfig,
    dist: Dist,
    *,
    seed: int,
    update: int,
) -> RolloutBatch:
    """Sample one answer a prompt and turn them into experience.

    Args:
        models: the four models.
        prompts: this rank's prompts.
        uids: their numbers in the rollout batch, unique over ranks: the randomness of an answer
            depends on (seed, update, uid) alone, not on where it is sampled.
        ppo: settings.
        dist: process group.
        seed: of the run.
        update: number of the update.

    Raises:
        NonFiniteError: on every rank, when any rank computed a non-finite score or log-prob.
    """
    batch = RolloutBatch()

    # 1. Sample answers from the weights that train.
    began = time.perf_counter()
    models.actor.eval()
    rollout: Rollout = models.actor.rollout(
        [p.input_ids for p in prompts],
        sampling_params(models, ppo, seed=seed, step=update),
        uids=uids,
    )
    models.actor.train()
    batch.generate_seconds = time.perf_counter() - began

    # 2. Score: old and reference log-probs, values, rewards. Micro-batches keep their rows and
    #    their padding from here to the end of the update.
    began = time.perf_counter()
    scored = []
    size = ppo.micro_batch_size
    for start in range(0, len(prompts), size):
        rows = slice(start, start + size)
        answers = lay_out(
            [p.input_ids for p in prompts[rows]], rollout.tokens[rows], device=dist.device
        )
        old_BT, entropy_BT = score_policy(
            models.actor,
            answers,
            temperature=ppo.temperature,
            suppress_ids=models.suppress_ids,
            with_entropy=True,
        )
        reference_BT, _ = score_policy(
            models.reference,
            answers,
            temperature=ppo.temperature,
            suppress_ids=models.suppress_ids,
        )
        with torch.no_grad():
            values_BT = answers.at_actions(
                models.critic(answers.input_ids_BL, answers.position_ids_BL)
            )
        scores_B = models.scorer(
            answers, prompts[rows], rollout.tokens[rows], rollout.stopped[rows]
        )
        kl_BT = torch.where(answers.action_mask_BT, k1(old_BT, reference_BT), 0.0)
        assert entropy_BT is not None
        scored.append((answers, old_BT, kl_BT, values_BT, scores_B))
        gap = _log(batch, answers, rollout, rows, old_BT, kl_BT, entropy_BT, scores_B)
        batch.max_logprob_gap = max(batch.max_logprob_gap, gap)
    _check_finite(batch, dist)

    # 3. Rewards, GAE, and whitening over every action token of every rank.
    unwhitened = []
    totals = [0.0, 0.0, 0.0]
    variance_sums = [0.0] * 5
    for answers, old_BT, kl_BT, values_BT, scores_B in scored:
        mask_BT = answers.action_mask_BT
        rewards_BT = token_rewards(scores_B, kl_BT, mask_BT, kl_coef=ppo.kl_coef)
        advantages_BT, returns_BT = gae(
            rewards_BT, values_BT, mask_BT, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda
        )
        unwhitened.append((answers, old_BT, values_BT, advantages_BT, returns_BT))
        totals = [a + b for a, b in zip(totals, moments(advantages_BT, mask_BT), strict=True)]
        residual = moments(returns_BT - values_BT, mask_BT)
        returns = moments(returns_BT, mask_BT)
        variance_sums = [
            a + b for a, b in zip(variance_sums, [*returns, *residual[1:]], strict=True)
        ]
    totals = dist.sum(totals)
    for answers, old_BT, values_BT, advantages_BT, returns_BT in unwhitened:
        if ppo.whiten_advantages:
            advantages_BT = whiten(advantages_BT, answers.action_mask_BT, totals)
        batch.experience.append(Experience(answers, old_BT, values_BT, advantages_BT, returns_BT))
    batch.add(
        return_sum=variance_sums[1],
        return_squares=variance_sums[2],
        residual_sum=variance_sums[3],
        residual_squares=variance_sums[4],
    )
    batch.score_seconds = time.perf_counter() - began
    return batch


def _log(
    batch: RolloutBatch,
    answers: Answers,
    rollout: Rollout,
    rows: slice,
    old_BT: torch.Tensor,
    kl_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    scores_B: torch.Tensor,
) -> float:
    """Add a micro-batch to the sums; returns its largest sampler-trainer log-prob gap."""
    mask_BT = answers.action_mask_BT
    sampled_BT = torch.zeros_like(old_BT)
    for row, logprobs in enumerate(rollout.logprobs[rows]):
        sampled_BT[row, : len(logprobs)] = logprobs.to(old_BT.device)
    gap_BT = torch.where(mask_BT, (sampled_BT - old_BT).abs(), 0.0)
    batch.add(
        answers=float(len(answers)),
        tokens=float(mask_BT.sum()),
        score=float(scores_B.sum()),
        score_squares=float((scores_B.double() ** 2).sum()),
        kl=float(kl_BT.sum()),
        entropy=float(torch.where(mask_BT, entropy_BT, 0.0).sum()),
        stopped=float(sum(rollout.stopped[rows])),
        logprob_gap=float(gap_BT.sum()),
    )
    return float(gap_BT.max())


def _check_finite(batch: RolloutBatch, dist: Dist) -> None:
    """Raise on every rank when any rank's sums are not finite."""
    names = ("score", "kl", "entropy", "logprob_gap")
    bad = [float(not torch.isfinite(torch.tensor(batch.sums[n]))) for n in names]
    for name, count in zip(names, dist.sum(bad), strict=True):
        if count:
            raise NonFiniteError(f"non-finite {name} in the rollout on {int(count)} rank(s)")
