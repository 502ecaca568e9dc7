"""Do rollouts sample the policy that trains? Log-probs and draws against the training forward.

An engine that decodes with a wrong mask, position or cache still makes fluent text; what it
cannot make is the training forward's log-probs. And one that samples wrongly still has those of
whatever it drew: its uniforms pick other tokens. So a few prompts are answered, greedily, sampled,
and sampled with stop ids that some answers meet, and scored by the forward that the loss
differentiates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlhf_app.hybrid_engine import lora
from rlhf_app.hybrid_engine.decode_step import RECAPTURE_PAYS_TOKENS
from rlhf_app.hybrid_engine.draws import RowScores, end_problems, judge_tokens, together
from rlhf_app.hybrid_engine.noise_floor import difference, routes, with_floor, with_routing
from rlhf_app.hybrid_engine.sampling import SamplingParams
from rlhf_app.hybrid_engine.temporarily import temporarily
from rlhf_app.hybrid_engine.training_scores import Answered, training_scores
from rlhf_app.report.verification import Draws, Gap
from rlhf_app.training.distributed import Dist
from rlhf_app.training.error_phase import within

log = logging.getLogger(__name__)

# Prompts on each rank, and answer tokens of each, that `check_rollouts` looks at. The sampled
# answers are longer: as long as it takes for a rollout to be worth a CUDA graph, so that the
# run's own decode form is what is looked at, and positions that short prompts do not reach.
_CHECK_PROMPTS = 4
_CHECK_TOKENS = 8
_CHECK_SAMPLED_TOKENS = RECAPTURE_PAYS_TOKENS

# Mean and largest gap that rounding explains, in units of (1 + spread of the logits) times the
# dtype's epsilon: an untrained model's log-probs hardly depend on anything, and an error in them
# is as small. Seen over 14 models: at most 2.7 and 17 in fp32, .8 and 7 in bf16, whose spacing is
# felt only where a layer's result is stored. Positions off by one: 58,000 in fp32, 3 in bf16.
_UNITS = {torch.float32: (50.0, 500.0), torch.float64: (50.0, 500.0)}
_HALF_UNITS = (1.5, 20.0)


class RolloutMismatch(RuntimeError):
    """Rollouts do not sample the policy that trains; training on them would be wrong."""


@within("generate")
def check_rollouts(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    dist: Dist,
    *,
    lengths: Sequence[int] | None = None,
    answers: int = 0,
) -> dict[str, float]:
    """Answer a few prompts and compare with the training forward; all ranks call it.

    Args:
        engine: a HybridEngine; it is in the same mode afterwards.
        prompts: token ids of what rollouts will be given, at least one prompt and the same on
            every rank; the longest, the shortest and two between are tried, others on each rank.
        params: of the run's rollouts, no top-k or top-p; the number of tokens is ours.
        dist: process group.
        lengths: of the prompts, where they are known; only the prompts that are tried are read.
        answers: of one of the run's rollouts on this rank: the check decodes in the form that
            so many answers decode in.

    Returns:
        Over all ranks the mean and largest log-prob gap, in nats, the number of tokens compared,
        and the share of sampled tokens that the training forward would not have drawn.

    Raises:
        RolloutMismatch: on every rank, when on any the log-prob gap or the draws are not what
            rounding explains, answers do not end at their stop ids, or nothing is finite.
    """
    chosen = _choose(prompts, lengths or [len(prompt) for prompt in prompts], dist)
    training = engine.module.training
    few = replace(params, max_new_tokens=min(_CHECK_TOKENS, params.max_new_tokens))
    more = replace(params, max_new_tokens=min(_CHECK_SAMPLED_TOKENS, params.max_new_tokens))
    engine.eval()
    with temporarily([engine.generator], "stands_for", answers * params.max_new_tokens):
        answered = [answer(engine, chosen, replace(few, greedy=True))]
        answered.append(answer(engine, chosen, replace(more, greedy=False)))
        answered.append(
            answer(engine, chosen, with_stops(replace(few, greedy=False), answered[1], dist))
        )
    engine.train()
    try:
        gap, draws = compare(engine, answered, dist)
    finally:
        engine.train(training)
    everyone = [
        (Gap(**gap_values), Draws.from_dict(draw_values))
        for gap_values, draw_values in dist.gather_objects((gap.as_dict(), draws.as_dict()))
    ]
    gaps = [gap for gap, _ in everyone]
    broken = next((gap for gap in gaps if gap.not_finite or not gap.tokens), None)
    if broken is not None:
        raise RolloutMismatch(
            f"rollouts cannot be compared with the policy that trains: {broken}; the weights of "
            "the model are broken (NaN), or overflow in its dtype: give another model or dtype"
        )
    worst = max(gaps, key=lambda gap: gap.excess)
    problems = [] if worst.ok else [str(worst)]
    problems += [problem for _, draws in everyone for problem in draws.problems]
    if problems:
        raise RolloutMismatch(
            f"rollouts do not sample the policy that trains: {problems[0]}; set "
            "hybrid_engine.enabled: false to use native generate, and see rlhf verify"
        )
    tokens = sum(gap.tokens for gap in gaps)
    sampled = [draws.sampled for _, draws in everyone]
    log.info("rollouts sample the policy that trains: %s", worst)
    return {
        "mean": sum(gap.mean * gap.tokens for gap in gaps) / tokens,
        "max": max(gap.max for gap in gaps),
        "tokens": float(tokens),
        "missed": sum(part.misses for part in sampled) / sum(part.tokens for part in sampled),
    }


def _choose(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], dist: Dist
) -> list[Sequence[int]]:
    """The longest, shortest and two prompts between, others on each rank where there are others."""
    ordered = np.argsort(lengths, kind="stable")
    last = len(ordered) - 1
    places = [part * last // (_CHECK_PROMPTS - 1) for part in range(_CHECK_PROMPTS)]
    # Ranks go inwards from both ends, and upwards between them.
    shifts = [*[dist.rank] * (_CHECK_PROMPTS - 1), -dist.rank]
    return [
        prompts[int(ordered[(place + shift) % len(ordered)])]
        for place, shift in zip(places, shifts, strict=True)
    ]


def with_stops(params: SamplingParams, drawn: Answered, dist: Dist) -> SamplingParams:
    """The parameters with stop ids that end some answers early; all ranks call it.

    Args:
        params: of a rollout that draws what `drawn` drew.
        drawn: answers without these stop ids. Every second one shall end, at its third token.
        dist: process group. Ranks that share rollouts need the same parameters.
    """
    mine = [tokens[min(2, len(tokens) - 1)] for tokens in drawn.answers[::2]]
    found = {token for ids in dist.gather_objects(mine) for token in ids}
    return replace(params, stop_ids=tuple(sorted(found | set(params.stop_ids))))


def answer(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_slots: int | None = None,
) -> Answered:
    """One rollout of an engine that is in eval mode."""
    rollout = engine.rollout(prompts, params, max_slots=max_slots)
    return Answered(prompts, rollout.tokens, rollout.logprobs, params, rollout.stopped)


def compare(
    engine: Any, answered: Sequence[Answered], dist: Dist, *, floor: bool = False
) -> tuple[Gap, Draws]:
    """Rollouts against the training forward on this rank; all ranks call it.

    The same tokens are scored again row by row where rounding has to be told from error: the
    difference of two training forwards in different batch shapes is the noise floor.

    Args:
        engine: in train mode.
        answered: what to compare.
        dist: process group.
        floor: measure the noise floor in any case.

    Returns:
        The gap of log-probs, and whether tokens are those that the training forward's
        distribution and their uniforms give.
    """
    scored = [training_scores(engine, part) for part in answered]
    scores = [score for part in scored for score in part]
    trained = [row.logprobs for row, _ in scores]
    sampled = [logprobs for part in answered for logprobs in part.logprobs]
    mean, largest, tokens = difference(sampled, trained)
    dtype = _dtype(engine.module)
    unit = torch.finfo(dtype).eps * (1.0 + sum(spread for _, spread in scores) / len(scores))
    expected = _UNITS.get(dtype, _HALF_UNITS)
    lost = sum(int(row.isnan().sum()) for row in trained)
    gap = Gap(mean, largest, tokens, expected[0] * unit, expected[1] * unit, not_finite=lost)
    rows = [[row for row, _ in part] for part in scored]
    draws = _judge(answered, rows, gap)
    # One rank's doubt is everyone's: under ZeRO-3 a forward needs every rank.
    if dist.any(floor or not gap.ok or bool(draws.problems)):
        gap = with_floor(engine, answered, trained, gap, dist)
        draws = _judge(answered, rows, gap)
    if routes(engine.module) and dist.any(not gap.ok or bool(draws.problems)):
        gap = with_routing(engine, answered, trained, gap)
        draws = _judge(answered, rows, gap)
    return gap, draws


def _judge(answered: Sequence[Answered], scores: list[list[RowScores]], gap: Gap) -> Draws:
    """The draws under a log-prob gap that rounding explains."""
    parts, ends = [], []
    for part, rows in zip(answered, scores, strict=True):
        misses = judge_tokens(rows, part.params, gap.mean_bound, gap.max_bound)
        parts.append((part.params.greedy, misses))
        ends += end_problems(part.answers, part.stopped, part.params)
    return together(parts, ends, sum(len(part.answers) for part in answered))


def _dtype(module: Any) -> torch.dtype:
    """Of the embedding: a partitioned weight keeps its dtype."""
    dtype: torch.dtype = lora.without_wrapper(module).get_input_embeddings().weight.dtype
    return dtype
