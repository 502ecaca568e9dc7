"""Held-out evaluation of a policy: reward, gold score, KL, diversity, length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from data_sources.examples import PromptExample
from rlhf_app.config.schema import PPOConfig
from rlhf_app.hybrid_engine import Generator, HybridEngine
from rlhf_app.models.whole_rows import whole_rows
from rlhf_app.scorers import Scorer
from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.distributed import Dist
from stages.ppo.batching import score_batches
from stages.ppo.experience import Answers, AnswerTable
from stages.ppo.logprobs import score_policy
from stages.ppo.models import PPOModels
from stages.ppo.rollout import sampling_params

# One fixed rollout step, so that every policy answers with the same random numbers and the
# difference between two evaluations is the policies'.
EVALUATION_STEP = 2**30


@dataclass(frozen=True)
class PolicyReport:
    """Means over the held-out prompts.

    Attributes:
        reward: normalised, clipped score of the reward model, missing-EOS rule applied.
        gold: mean of the independent scorer, or None.
        kl_per_answer: sum over tokens of log pi - log pi_ref, mean over answers, nats.
        distinct_3: distinct token trigrams over all trigrams of all answers.
        answer_length: tokens, EOS included.
        eos_rate: share of answers that end with a stop token.
        answers: decoded, in prompt order.
    """

    reward: float
    gold: float | None
    kl_per_answer: float
    distinct_3: float
    answer_length: float
    eos_rate: float
    answers: list[str]

    def numbers(self) -> dict[str, float]:
        """The scalar fields that are known, for the metrics file."""
        return {k: v for k, v in asdict(self).items() if isinstance(v, float)}


@dataclass(frozen=True, slots=True)
class _Answer:
    """One held-out answer, with `uid` its place in the list of prompts."""

    uid: int
    text: str
    tokens: list[int]
    stopped: bool
    score: float
    kl: float
    gold: float | None


def distinct_n(answers: Sequence[Sequence[int]], n: int = 3) -> float:
    """Distinct n-grams over all n-grams (Li et al. 2016, arXiv:1510.03055), over all answers.

    Args:
        answers: token ids.
        n: size of a gram.

    Returns:
        A share in (0, 1]; 0 when no answer has n tokens.
    """
    grams = [tuple(a[i : i + n]) for a in answers for i in range(len(a) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def evaluate_policy(
    sampler: HybridEngine | Generator,
    policy: Any,
    models: PPOModels,
    prompts: Sequence[PromptExample],
    ppo: PPOConfig,
    dist: Dist,
    *,
    gold: Scorer | None,
    seed: int,
) -> PolicyReport:
    """Answer every prompt once and score the answers. Prompts are shared out over the ranks.

    Args:
        sampler: generates from the policy.
        policy: the module or engine whose log-probs are compared with the reference's; or
            `models.reference` where the sampler has its weights, which is then run once.
        models: reference, reward model and formats.
        prompts: held-out prompts, the same list on every rank.
        ppo: settings.
        dist: process group.
        gold: independent scorer of (prompt texts, answer texts).
        seed: of the run.

    Returns:
        The same report on every rank.

    Raises:
        NonFiniteError: on every rank, when any score or log-prob is not finite.
    """
    uids = list(range(dist.rank, len(prompts), dist.world_size))
    count = len(uids)
    if count * dist.world_size < len(prompts):
        # Under ZeRO-3 a forward needs every rank: a short rank answers one prompt more, unused.
        uids.append(0)
    mine = [prompts[uid] for uid in uids]
    params = sampling_params(models, ppo, seed=seed, step=EVALUATION_STEP)
    rollout = sampler.rollout([p.input_ids for p in mine], params, uids=uids)
    texts = [models.chat_format.decode(tokens) for tokens in rollout.tokens]
    golds: list[float | None] = [None] * len(mine)
    if gold and count:
        golds[:count] = gold([p.text for p in mine[:count]], texts[:count])
    table = AnswerTable([p.input_ids for p in mine], rollout.tokens, dist.device)
    kl_N, scores_N = torch.zeros(2, len(mine), device=dist.device)
    for rows in score_batches(table.lengths, ppo, dist):
        answers = table.layout(rows)
        logprobs_BT, reference_BT = _both_logprobs(policy, models, answers, ppo)
        kl_BT = torch.where(answers.action_mask_BT, logprobs_BT - reference_BT, 0.0)
        kl_N.index_copy_(0, answers.rows_B, kl_BT.sum(dim=1))
        scores_B = models.scorer(
            answers,
            [mine[row] for row in rows],
            [rollout.tokens[row] for row in rows],
            [rollout.stopped[row] for row in rows],
        )
        scores_N.index_copy_(0, answers.rows_B, scores_B)
    columns = (uids, texts, rollout.tokens, rollout.stopped, scores_N.tolist(), kl_N.tolist())
    per_answer = [_Answer(*row) for row in zip(*columns, golds, strict=True)]
    return _report([row for part in dist.gather_objects(per_answer[:count]) for row in part])


@whole_rows()
def _both_logprobs(
    policy: Any, models: PPOModels, answers: Answers, ppo: PPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the policy and of the reference, computed once where they are the same."""
    how: dict[str, Any] = {"temperature": ppo.temperature, "suppress_ids": models.suppress_ids}
    logprobs_BT, _ = score_policy(policy, answers, **how)
    if policy is models.reference:
        return logprobs_BT, logprobs_BT
    return logprobs_BT, score_policy(models.reference, answers, **how)[0]


def _report(answers: list[_Answer]) -> PolicyReport:
    answers = sorted(answers, key=lambda a: a.uid)
    bad = [a for a in answers if not (math.isfinite(a.score) and math.isfinite(a.kl))]
    if bad:
        raise NonFiniteError(
            f"{len(bad)} of {len(answers)} held-out answers have a score or KL that is not finite: "
            "check the reward model and the actor's weights"
        )
    count = len(answers)
    golds = [a.gold for a in answers if a.gold is not None]
    return PolicyReport(
        reward=sum(a.score for a in answers) / count,
        gold=sum(golds) / count if golds else None,
        kl_per_answer=sum(a.kl for a in answers) / count,
        distinct_3=distinct_n([a.tokens for a in answers]),
        answer_length=sum(len(a.tokens) for a in answers) / count,
        eos_rate=sum(a.stopped for a in answers) / count,
        answers=[a.text for a in answers],
    )
