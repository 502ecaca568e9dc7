"""From prompts to experience: sample, score, and compute advantages.

Legend: B answers, T response tokens (actions).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from data_sources.examples import PromptExample
from rlhf_app.config.schema import PPOConfig
from rlhf_app.hybrid_engine import Rollout, SamplingParams
from rlhf_app.training.distributed import Dist
from stages.ppo.advantages import gae, moments, whiten
from stages.ppo.experience import Experience, lay_out
from stages.ppo.logprobs import score_policy
from stages.ppo.models import PPOModels
from stages.ppo.rewards import k1, token_rewards
from stages.ppo.rollout_stats import RolloutStats


@dataclass
class RolloutBatch:
    """The experience of one update on this rank, with numbers for the log."""

    experience: list[Experience] = field(default_factory=list)
    stats: RolloutStats = field(default_factory=RolloutStats)
    generate_seconds: float = 0.0
    score_seconds: float = 0.0


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
        batch.stats.add_scores(
            answers,
            sampled_logprobs=rollout.logprobs[rows],
            stopped=rollout.stopped[rows],
            old_BT=old_BT,
            kl_BT=kl_BT,
            entropy_BT=entropy_BT,
            scores_B=scores_B,
        )
    batch.stats.check_finite(dist)

    # 3. Rewards, GAE, and whitening over every action token of every rank.
    unwhitened = []
    totals = [0.0, 0.0, 0.0]
    for answers, old_BT, kl_BT, values_BT, scores_B in scored:
        mask_BT = answers.action_mask_BT
        rewards_BT = token_rewards(scores_B, kl_BT, mask_BT, kl_coef=ppo.kl_coef)
        advantages_BT, returns_BT = gae(
            rewards_BT, values_BT, mask_BT, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda
        )
        batch.stats.add_returns(returns_BT, values_BT, mask_BT)
        totals = [a + b for a, b in zip(totals, moments(advantages_BT, mask_BT), strict=True)]
        unwhitened.append(Experience(answers, old_BT, values_BT, advantages_BT, returns_BT))
    if ppo.whiten_advantages:
        totals = dist.sum(totals)
        batch.experience = [
            replace(e, advantages_BT=whiten(e.advantages_BT, e.answers.action_mask_BT, totals))
            for e in unwhitened
        ]
    else:
        batch.experience = unwhitened
    batch.score_seconds = time.perf_counter() - began
    return batch
