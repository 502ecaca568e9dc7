"""From prompts to experience: sample, score, and compute advantages.

Legend: N all answers of this rank, B answers of a micro-batch, L tokens of prompt + response,
T response tokens (actions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from data_sources.examples import PromptExample
from rlhf_app.config.schema import PPOConfig
from rlhf_app.hybrid_engine import Rollout, SamplingParams
from rlhf_app.models.whole_rows import whole_rows
from rlhf_app.training.distributed import Dist
from rlhf_app.training.host_copy import to_device
from rlhf_app.training.micro_batches import computed_tokens
from rlhf_app.training.phases import PhaseClock
from stages.ppo.advantages import moments, whiten
from stages.ppo.batching import score_batches, update_batches
from stages.ppo.diversity import rollout_diversity
from stages.ppo.estimate import estimate_advantages
from stages.ppo.experience import Answers, AnswerTable, Experience
from stages.ppo.logprobs import score_policy
from stages.ppo.models import PPOModels
from stages.ppo.reward_sources.combined import score_answers
from stages.ppo.rollout_stats import RolloutStats, ScoredAnswers, rollout_sums


@dataclass(frozen=True)
class RolloutBatch:
    """The experience of one update on this rank, with numbers for the log.

    Attributes:
        experience: micro-batches, equally many for each mini-batch and on every rank.
        stats: sums over this rank's answers.
        diversity: of all ranks' answers; see `rollout_diversity`.
        clock: of the phases generate, old, reference, values, reward and advantages.
    """

    experience: list[Experience]
    stats: RolloutStats
    diversity: dict[str, float]
    clock: PhaseClock

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase on this rank; the device's own on CUDA, which it waits for."""
        return self.clock.seconds()


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
    kl_coef: float | None = None,
) -> RolloutBatch:
    """Sample an answer to each of the prompts and turn them into experience.

    Args:
        models: actor, reference, critic where there is one, and rewards.
        prompts: this rank's prompts, one of each answer: `answers_per_prompt` neighbours in uid
            are the same.
        uids: their numbers in the rollout batch, unique over ranks: the randomness of an answer
            depends on (seed, update, uid) alone, not on where it is sampled.
        ppo: settings.
        dist: process group.
        seed: of the run.
        update: number of the update.
        kl_coef: weight of the KL penalty; unset: the settings'.

    Raises:
        NonFiniteError: on every rank, when any rank computed a non-finite score or log-prob.
    """
    clock = PhaseClock(dist.device)

    # 1. Sample answers from the weights that train.
    models.actor.eval()
    with clock.phase("generate"):
        rollout: Rollout = models.actor.rollout(
            [p.input_ids for p in prompts],
            sampling_params(models, ppo, seed=seed, step=update),
            uids=uids,
        )
    models.actor.train()

    # 2. Score: old and reference log-probs, values, rewards.
    table = AnswerTable([p.input_ids for p in prompts], rollout.tokens, dist.device)
    cut = update_batches(table.lengths, ppo, dist)
    micro_batches = [table.layout(rows) for rows in cut]
    scored = _score(models, prompts, rollout, table, micro_batches, ppo, dist, clock)

    diversity = rollout_diversity(rollout.tokens, dist)  # while the device scores

    # 3. Rewards, advantages, and whitening over every action token of every rank.
    with clock.phase("advantages"):
        log_ratio_NT = torch.where(scored.mask_NT, scored.old_NT - scored.reference_NT, 0.0)
        advantages_NT, returns_NT = estimate_advantages(
            scored,
            log_ratio_NT,
            uids,
            ppo,
            dist,
            kl_coef=ppo.kl_coef if kl_coef is None else kl_coef,
        )
        sums = rollout_sums(scored, log_ratio_NT, returns_NT)
        own = moments(advantages_NT, scored.mask_NT)
        # With GAE the only wait for the device after the rollout.
        *read, count, total, squares = torch.cat([torch.stack([*sums.values()]), own]).tolist()
        known = {
            "answers": len(table),
            "tokens": sum(map(len, rollout.tokens)),
            "stopped": sum(rollout.stopped),
            "row_tokens": sum(table.lengths),
            "computed_tokens": computed_tokens(cut, table.lengths),
        }
        stats = RolloutStats(dict(zip(sums, read, strict=True)) | known)
        stats.check_finite(dist)
        if ppo.whitens_advantages:
            totals = dist.sum([count, total, squares])
            advantages_NT = whiten(advantages_NT, scored.mask_NT, totals)
        experience = [
            Experience(
                answers,
                old_logprobs_BT=answers.take(scored.old_NT),
                reference_BT=answers.take(scored.reference_NT),
                advantages_BT=answers.take(advantages_NT),
                old_values_BT=_take(answers, scored.values_NT),
                returns_BT=_take(answers, returns_NT),
            )
            for answers in micro_batches
        ]
    return RolloutBatch(experience, stats, diversity, clock)


def _take(answers: Answers, table_NT: torch.Tensor | None) -> torch.Tensor | None:
    return None if table_NT is None else answers.take(table_NT)


@torch.no_grad()
@whole_rows()
def _score(
    models: PPOModels,
    prompts: Sequence[PromptExample],
    rollout: Rollout,
    table: AnswerTable,
    micro_batches: Sequence[Answers],
    ppo: PPOConfig,
    dist: Dist,
    clock: PhaseClock,
) -> ScoredAnswers:
    """Run the models over all answers, one after the other, without reading a number.

    The actor runs over the update's own micro-batches, so that the first ratio is exactly 1,
    and so does the reference: while it has the actor's weights, only the same shapes give the
    same bits, and KL 0. Critic and reward model run over larger batches.
    """
    size = (len(table), table.longest_response)
    old_NT, reference_NT, entropy_NT = torch.zeros(3, *size, device=dist.device)
    with clock.phase("old"):
        for answers in micro_batches:
            old_BT, entropy_BT = score_policy(
                models.actor,
                answers,
                temperature=ppo.temperature,
                suppress_ids=models.suppress_ids,
                with_entropy=True,
            )
            assert entropy_BT is not None
            answers.put(old_BT, old_NT)
            answers.put(entropy_BT, entropy_NT)
    with clock.phase("reference"):
        for answers in micro_batches:
            reference_BT, _ = score_policy(
                models.reference,
                answers,
                temperature=ppo.temperature,
                suppress_ids=models.suppress_ids,
            )
            answers.put(reference_BT, reference_NT)
    parts = score_batches(table.lengths, ppo, dist)
    batches = [table.layout(rows) for rows in parts]
    values_NT = None
    if models.critic is not None:
        values_NT = torch.zeros(*size, device=dist.device)
        with clock.phase("values"):
            for answers in batches:
                values_BL = models.critic(answers.input_ids_BL, answers.position_ids_BL)
                answers.put(answers.at_actions(values_BL), values_NT)
    with clock.phase("reward"):
        scores_N = score_answers(
            models.scorer,
            list(zip(parts, batches, strict=True)),
            prompts,
            rollout.tokens,
            rollout.stopped,
        )
    sampled_NT = pad_sequence(rollout.logprobs, batch_first=True)
    if sampled_NT.shape[1] < size[1]:
        sampled_NT = sampled_NT.new_zeros(size)  # no answer has a token
    return ScoredAnswers(
        mask_NT=table.action_mask(),
        sampled_NT=to_device(sampled_NT, dist.device),
        old_NT=old_NT,
        reference_NT=reference_NT,
        entropy_NT=entropy_NT,
        values_NT=values_NT,
        scores_N=scores_N,
    )
