"""Held-out evaluation of a policy: reward, gold score, KL, diversity, length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import torch

from data_sources.examples import PromptExample
from rlhf_app.config.schema import PPOConfig
from rlhf_app.hybrid_engine import Generator, HybridEngine
from rlhf_app.models.whole_rows import whole_rows
from rlhf_app.scorers import Scorer
from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.correlation import correlation
from rlhf_app.training.distributed import Dist
from stages.ppo.batching import score_batches
from stages.ppo.experience import Answers, AnswerTable
from stages.ppo.logprobs import score_policy
from stages.ppo.models import PPOModels
from stages.ppo.reward_sources.combined import agree, score_answers
from stages.ppo.rollout import sampling_params

# One fixed rollout step, so that every policy answers with the same random numbers and the
# difference between two evaluations is the policies'.
EVALUATION_STEP = 2**30


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """One held-out answer.

    Attributes:
        uid: the prompt's place in the list of held-out prompts.
        text: decoded.
        tokens: ids, EOS included.
        stopped: ends with a stop token.
        reward: normalised, clipped score of the reward model, missing-EOS rule applied.
        kl: sum over its tokens of log pi - log pi_ref, nats.
        entropy: of the policy, summed over its tokens, nats.
        gold: of the independent scorer, or None.
    """

    uid: int
    text: str
    tokens: list[int]
    stopped: bool
    reward: float
    kl: float
    entropy: float
    gold: float | None


@dataclass(frozen=True)
class PolicyReport:
    """Numbers of a policy on the held-out prompts, one answer each.

    Attributes:
        reward: mean reward.
        reward_std: its standard deviation over answers, population form.
        gold: mean of the independent scorer, or None.
        kl_per_answer: mean over answers of the sum over tokens, nats.
        entropy: mean over tokens, nats.
        distinct_3: distinct token trigrams over all trigrams of all answers.
        answer_length: tokens, EOS included.
        eos_rate: share of answers that end with a stop token.
        reward_length_correlation: Pearson's, over answers; None where one of them is the same
            for all.
        gold_length_correlation: the same for gold.
        rows: the answers, in the order of the prompts.
    """

    reward: float
    reward_std: float
    gold: float | None
    kl_per_answer: float
    entropy: float
    distinct_3: float
    answer_length: float
    eos_rate: float
    reward_length_correlation: float | None
    gold_length_correlation: float | None
    rows: list[HeldOutAnswer]

    @classmethod
    def of(cls, rows: Iterable[HeldOutAnswer]) -> PolicyReport:
        """The numbers of all ranks' answers; sums run in the order of the prompts.

        Raises:
            NonFiniteError: a reward or KL is not finite.
        """
        rows = sorted(rows, key=lambda row: row.uid)
        bad = [r for r in rows if not (math.isfinite(r.reward) and math.isfinite(r.kl))]
        if bad:
            raise NonFiniteError(
                f"{len(bad)} of {len(rows)} held-out answers have a score or KL that is not "
                "finite: check the reward model and the actor's weights"
            )
        count = len(rows)
        tokens = sum(len(row.tokens) for row in rows)
        reward = sum(row.reward for row in rows) / count
        golds = [row.gold for row in rows if row.gold is not None]
        return cls(
            reward=reward,
            reward_std=math.sqrt(sum((row.reward - reward) ** 2 for row in rows) / count),
            gold=sum(golds) / count if golds else None,
            kl_per_answer=sum(row.kl for row in rows) / count,
            entropy=sum(row.entropy for row in rows) / max(tokens, 1),
            distinct_3=distinct_n([row.tokens for row in rows]),
            answer_length=tokens / count,
            eos_rate=sum(row.stopped for row in rows) / count,
            reward_length_correlation=_with_length([row.reward for row in rows], rows),
            gold_length_correlation=_with_length(golds, rows) if golds else None,
            rows=rows,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> PolicyReport:
        """From its fields, as `dataclasses.asdict` gives them."""
        return cls(**{**values, "rows": [HeldOutAnswer(**row) for row in values["rows"]]})

    @property
    def answers(self) -> list[str]:
        """Decoded, in the order of the prompts."""
        return [row.text for row in self.rows]

    def numbers(self) -> dict[str, float]:
        """The scalar fields that are known, for the metrics file."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, float)}


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
        ConfigError: on every rank, when the gold scorer or a source of rewards failed on any.
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
    if gold is not None:
        error: Exception | None = None
        try:
            if count:
                golds[:count] = gold([p.text for p in mine[:count]], texts[:count])
        except Exception as caught:
            error = caught
        agree(dist, error)
    table = AnswerTable([p.input_ids for p in mine], rollout.tokens, dist.device)
    kl_N, entropy_N = torch.zeros(2, len(mine), device=dist.device)
    batches = [(rows, table.layout(rows)) for rows in score_batches(table.lengths, ppo, dist)]
    for _, answers in batches:
        logprobs_BT, entropy_BT, reference_BT = _both_logprobs(policy, models, answers, ppo)
        kl_BT = torch.where(answers.action_mask_BT, logprobs_BT - reference_BT, 0.0)
        kl_N.index_copy_(0, answers.rows_B, kl_BT.sum(dim=1))
        entropy_N.index_copy_(0, answers.rows_B, entropy_BT.sum(dim=1))
    scores_N = score_answers(
        models.scorer, batches, mine, rollout.tokens, rollout.stopped, counted=count
    )
    columns = zip(
        uids,
        texts,
        rollout.tokens,
        rollout.stopped,
        scores_N.tolist(),
        kl_N.tolist(),
        entropy_N.tolist(),
        golds,
        strict=True,
    )
    per_answer = [HeldOutAnswer(*row) for row in columns]
    return PolicyReport.of(chain.from_iterable(dist.gather_objects(per_answer[:count])))


@whole_rows()
def _both_logprobs(
    policy: Any, models: PPOModels, answers: Answers, ppo: PPOConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of the policy, and log-probs of the reference, all fp32 [B, T].

    They are computed once where the two are the same.
    """
    how: dict[str, Any] = {"temperature": ppo.temperature, "suppress_ids": models.suppress_ids}
    logprobs_BT, entropy_BT = score_policy(policy, answers, with_entropy=True, **how)
    assert entropy_BT is not None
    if policy is models.reference:
        return logprobs_BT, entropy_BT, logprobs_BT
    return logprobs_BT, entropy_BT, score_policy(models.reference, answers, **how)[0]


def _with_length(scores: Sequence[float], rows: Sequence[HeldOutAnswer]) -> float | None:
    """Correlation of a score of each answer with the answer's tokens."""
    lengths = [len(row.tokens) for row in rows]
    found = correlation(
        len(rows),
        math.fsum(scores),
        sum(lengths),
        math.fsum(s * s for s in scores),
        sum(n * n for n in lengths),
        math.fsum(s * n for s, n in zip(scores, lengths, strict=True)),
    )
    return None if math.isnan(found) else found
