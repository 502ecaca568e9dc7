"""Do rollouts sample the policy that trains? Their log-probs against the training forward's.

Shapes: R rows, L tokens of prompt and answer, T answer tokens, V vocabulary.

An engine that decodes with a wrong mask, position or cache still makes fluent text; what it
cannot make is the training forward's log-probs. So a few prompts are answered, greedily and
sampled, and scored by the forward that the loss differentiates.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_app.hybrid_engine import lora
from rlhf_app.hybrid_engine.sampling import SamplingParams
from rlhf_app.report.verification import Gap
from rlhf_app.training.distributed import Dist

log = logging.getLogger(__name__)

#: Prompts on each rank, and answer tokens of each, that `check_rollouts` looks at.
CHECK_PROMPTS = 4
CHECK_TOKENS = 8

# Mean and largest gap that rounding explains, in units of (1 + spread of the logits) times the
# dtype's epsilon: an untrained model's log-probs hardly depend on anything, and an error in them
# is as small. Seen over 14 models: at most 2.7 and 17 in fp32, .8 and 7 in bf16, whose spacing is
# felt only where a layer's result is stored. Positions off by one: 58,000 in fp32, 3 in bf16.
_UNITS = {torch.float32: (50.0, 500.0), torch.float64: (50.0, 500.0)}
_HALF_UNITS = (1.5, 20.0)
# Deep or sharp models round more: then their own noise floor, times these, is the bound.
_FLOORS = (4.0, 8.0)
_UNBOUNDED = 1e9


class RolloutMismatch(RuntimeError):
    """Rollouts do not sample the policy that trains; training on them would be wrong."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Prompts with their answers, and the log-probs that the rollout gave them.

    Attributes:
        prompts, answers: token ids.
        logprobs: one fp32 CPU tensor per answer.
        params: how the answers were drawn.
    """

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    logprobs: Sequence[torch.Tensor]
    params: SamplingParams


def check_rollouts(
    engine: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, dist: Dist
) -> dict[str, float]:
    """Answer a few prompts and compare log-probs with the training forward; all ranks call it.

    Args:
        engine: a HybridEngine; it is in the same mode afterwards.
        prompts: token ids, at least one prompt; the first few that this rank should try.
        params: of the run's rollouts, no top-k or top-p; the number of tokens is ours.
        dist: process group.

    Returns:
        Mean and largest gap over all ranks, in nats, and the number of tokens compared.

    Raises:
        RolloutMismatch: on every rank, when the gap on any is more than rounding explains.
    """
    chosen = [prompts[i % len(prompts)] for i in range(CHECK_PROMPTS)]
    params = replace(params, max_new_tokens=min(CHECK_TOKENS, params.max_new_tokens))
    training = engine.module.training
    engine.eval()
    answered = [answer(engine, chosen, replace(params, greedy=greedy)) for greedy in (True, False)]
    engine.train()
    try:
        mine = compare(engine, answered, dist)
    finally:
        engine.train(training)
    gaps = [Gap(**values) for values in dist.gather_objects(mine.as_dict())]
    worst = max(gaps, key=lambda gap: gap.excess)
    tokens = sum(gap.tokens for gap in gaps)
    numbers = {
        "mean": sum(gap.mean * gap.tokens for gap in gaps) / max(tokens, 1),
        "max": max(gap.max for gap in gaps),
        "tokens": float(tokens),
    }
    if not worst.ok:
        raise RolloutMismatch(
            f"rollouts do not sample the policy that trains: {worst}; set "
            "hybrid_engine.enabled: false to use native generate, and see rlhf verify"
        )
    log.info("rollout log-probs agree with the training forward's: %s", worst)
    return numbers


def answer(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_slots: int | None = None,
) -> Answered:
    """One rollout of an engine that is in eval mode."""
    rollout = engine.rollout(prompts, params, max_slots=max_slots)
    return Answered(prompts, rollout.tokens, rollout.logprobs, params)


def compare(engine: Any, answered: Sequence[Answered], dist: Dist, *, floor: bool = False) -> Gap:
    """Gap between rollouts and the training forward on this rank; all ranks call it.

    The same tokens are scored again row by row where rounding has to be told from error: the
    difference of two training forwards in different batch shapes is the noise floor.

    Args:
        engine: in train mode.
        answered: what to compare.
        dist: process group.
        floor: measure the noise floor in any case.
    """
    scores = [score for part in answered for score in _training_scores(engine, part)]
    trained = [logprobs for logprobs, _ in scores]
    sampled = [logprobs for part in answered for logprobs in part.logprobs]
    mean, largest, tokens = _difference(sampled, trained)
    dtype = _dtype(engine.module)
    unit = torch.finfo(dtype).eps * (1.0 + sum(spread for _, spread in scores) / len(scores))
    expected = _UNITS.get(dtype, _HALF_UNITS)
    gap = Gap(mean, largest, tokens, expected[0] * unit, expected[1] * unit)
    # One rank's doubt is everyone's: under ZeRO-3 a forward needs every rank.
    if dist.any(floor or not gap.ok):
        rows = [(part, row) for part in answered for row in range(len(part.prompts))]
        alone = []
        for index in range(max(dist.gather_objects(len(rows)))):
            part, row = rows[index % len(rows)]  # ranks with fewer rows repeat some, unused
            alone += training_logprobs(engine, _only(part, row))
        alone = alone[: len(rows)]
        floor_mean, floor_max, _ = _difference(alone, trained)
        gap = replace(
            gap,
            floor_mean=floor_mean,
            floor_max=floor_max,
            mean_bound=max(gap.mean_bound, _FLOORS[0] * floor_mean),
            max_bound=max(gap.max_bound, _FLOORS[1] * floor_max),
        )
    return gap


def training_logprobs(engine: Any, answered: Answered) -> list[torch.Tensor]:
    """Log-probs of answer tokens by the training forward, all rows in one right-padded batch.

    Args:
        engine: a DeepSpeed engine around a causal LM, or the model itself.
        answered: prompts and answers; their params say which distribution.

    Returns:
        One fp32 CPU tensor per answer.
    """
    return [logprobs for logprobs, _ in _training_scores(engine, answered)]


@torch.no_grad()
def _training_scores(engine: Any, answered: Answered) -> list[tuple[torch.Tensor, float]]:
    """Of each answer its tokens' log-probs, and the spread of the logits behind them."""
    params = answered.params
    assert params.top_k == 0, "the training forward knows no top-k"
    assert params.top_p == 1.0, "the training forward knows no top-p"
    rows = [[*p, *a] for p, a in zip(answered.prompts, answered.answers, strict=True)]
    logits_RLV = training_logits(engine, rows)
    found = []
    for row, (prompt, tokens) in enumerate(zip(answered.prompts, answered.answers, strict=True)):
        first = len(prompt) - 1
        logits_TV = logits_RLV[row, first : first + len(tokens)].float() / params.temperature
        spread = _spread(logits_TV)
        if params.suppress_ids:
            logits_TV[:, list(params.suppress_ids)] = -math.inf
        index_T1 = torch.tensor(list(tokens), device=logits_TV.device, dtype=torch.int64)[:, None]
        found.append((logits_TV.log_softmax(-1).gather(1, index_T1)[:, 0].cpu(), spread))
    return found


def _spread(logits_TV: torch.Tensor) -> float:
    """Standard deviation over the vocabulary, mean over tokens.

    Some models give entries that are no tokens a logit of -inf: they are left out. Weights so
    broken that nothing is left are for the guards of training to report.
    """
    known_TV = logits_TV.masked_fill(~logits_TV.isfinite(), math.nan)
    centred_TV = known_TV - known_TV.nanmean(-1, keepdim=True)
    return float(centred_TV.square().nanmean(-1).sqrt().nanmean().nan_to_num(0.0))


def training_logits(engine: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """The training forward of ragged rows: right-padded, positions from 0, no attention mask.

    Args:
        engine: a DeepSpeed engine around a causal LM, or the model itself.
        rows: token ids, none empty.

    Returns:
        [R, L, V] logits; causal attention keeps padding from what precedes it.
    """
    model = lora.without_wrapper(getattr(engine, "module", engine))
    device = model.get_input_embeddings().weight.device
    longest = max(map(len, rows))
    ids_RL = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    extras: dict[str, Any] = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        extras["position_ids"] = torch.arange(longest, device=device).expand(ids_RL.shape)
    logits: torch.Tensor = engine(input_ids=ids_RL, use_cache=False, **extras).logits
    return logits


def _only(answered: Answered, row: int) -> Answered:
    return replace(
        answered,
        prompts=[answered.prompts[row]],
        answers=[answered.answers[row]],
        logprobs=[answered.logprobs[row]],
    )


def _dtype(module: Any) -> torch.dtype:
    """Of the embedding: a partitioned weight keeps its dtype."""
    dtype: torch.dtype = lora.without_wrapper(module).get_input_embeddings().weight.dtype
    return dtype


def _difference(
    some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[float, float, int]:
    """Mean and largest absolute difference, and the number of tokens.

    Where the training forward itself is not finite there is nothing to compare with: the guards
    of training say what is wrong. A rollout that is not finite differs without bound.
    """
    one, other = torch.cat(list(some)).double(), torch.cat(list(others)).double()
    gap = (one - other)[other.isfinite()].abs()
    gap = gap.nan_to_num(nan=_UNBOUNDED, posinf=_UNBOUNDED)
    if not len(gap):
        return 0.0, 0.0, 0
    return float(gap.mean()), float(gap.max()), len(gap)
