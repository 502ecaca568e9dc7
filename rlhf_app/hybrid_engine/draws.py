"""Are answers drawn as asked? Each token against its uniform, each end against the stop ids.

Shapes: T answer tokens, V vocabulary.

Log-probs tell what a token's probability was, not that it was drawn with it: a sampler that
always takes the same token gets them right. The distribution here is the training forward's, in
fp64, and the uniforms are computed again on Python's integers: no code is the sampler's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rlhf_app.hybrid_engine.sampling import SamplingParams
from rlhf_app.report.verification import Draws, Misses

_WHOLE = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
# fp64's own rounding of a sum over a vocabulary.
_SUM_ERROR = 1e-9
# Nats; a bound above says nothing, and exp of it overflows.
_MOST_NATS = 50.0


class RowScores(NamedTuple):
    """The training forward's view of one answer, on the CPU.

    Attributes:
        logprobs: [T] fp64, of the tokens.
        below, upto: [T] fp64, the CDF before and after each token, in the order of the ids.
        short: [T] fp64, the largest log-prob minus the token's.
    """

    logprobs: torch.Tensor
    below: torch.Tensor
    upto: torch.Tensor
    short: torch.Tensor


def score_row(logits_TV: torch.Tensor, tokens: Sequence[int], params: SamplingParams) -> RowScores:
    """Look an answer up in the distribution that it should be drawn from.

    Args:
        logits_TV: [T, V] of the training forward, any float dtype.
        tokens: the answer.
        params: temperature and suppressed ids count.
    """
    logits_TV = logits_TV.double() / params.temperature
    if params.suppress_ids:
        logits_TV[:, list(params.suppress_ids)] = -math.inf
    index_T1 = torch.tensor(list(tokens), device=logits_TV.device, dtype=torch.int64)[:, None]
    logprobs_TV = logits_TV.log_softmax(-1)
    logprobs_T = logprobs_TV.gather(1, index_T1)[:, 0]
    upto_T = logprobs_TV.exp().cumsum(-1).gather(1, index_T1)[:, 0]
    found = (logprobs_T, upto_T - logprobs_T.exp(), upto_T, logprobs_TV.amax(-1) - logprobs_T)
    return RowScores(*(values.cpu() for values in found))


def uniform(seed: int, step: int, uid: int, index: int) -> float:
    """The uniform in (0, 1) behind token `index` of request `uid`: splitmix64 throughout.

    Args:
        seed: of the run.
        step: of the rollout.
        uid: of the request.
        index: of the token in its answer, from 0.
    """
    rollout = _splitmix((_splitmix((seed + _GOLDEN) % _WHOLE) + step) % _WHOLE)
    key = _splitmix(rollout ^ _splitmix((uid + _GOLDEN) % _WHOLE))
    return (2 * (_splitmix((key + (index + 1) * _GOLDEN) % _WHOLE) >> 24) + 1) / 2**41


def _splitmix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _WHOLE
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _WHOLE
    return z ^ (z >> 31)


def judge_tokens(
    scores: Sequence[RowScores], params: SamplingParams, mean_bound: float, max_bound: float
) -> Misses:
    """Whether each token is the one that its uniform, or greed, picks.

    A sampled token's uniform u lies between the rollout's CDF before and after it. When no
    log-prob of the rollout is more than d nats off the training forward's, its CDF is off by at
    most (e^d - 1) min(C, 1 - C) at a boundary C, because both the mass below and the mass above
    are off by at most the factor e^d: that is how far outside the training forward's interval u
    may lie, with d = `max_bound`. In the mean over tokens the CDF moves by no more than the total
    variation, half the mean log-prob gap: the mean distance may be `mean_bound`, twice that.

    A greedy token's log-prob may be below the largest by 2 d, as both are off, and in the mean by
    twice `mean_bound`.

    Args:
        scores: of each answer; the request's uid is its index. Tokens whose log-prob is NaN are
            left out: the log-prob gap reports them.
        params: how the tokens were drawn.
        mean_bound: mean log-prob gap that rounding explains, in nats.
        max_bound: the largest such gap.
    """
    most = min(max_bound, _MOST_NATS)
    distances: list[float] = []
    forbidden = 0
    worst = 0.0
    for uid, row in enumerate(scores):
        values = zip(*(column.tolist() for column in row), strict=True)
        for index, (logprob, below, upto, short) in enumerate(values):
            if math.isnan(logprob):
                continue
            if logprob == -math.inf:
                forbidden += 1
                continue
            if params.greedy:
                distance, tolerance = short, 2 * most
            else:
                u = uniform(params.seed, params.step, uid, index)
                distance = max(below - u, u - upto, 0.0)
                edge = below if u < below else upto
                tolerance = math.expm1(most) * min(edge, 1 - edge) + _SUM_ERROR
            distances.append(distance)
            worst = max(worst, distance / tolerance)
    count = len(distances)
    return Misses(
        tokens=count,
        misses=sum(distance > 0 for distance in distances),
        mean=sum(distances) / count if count else 0.0,
        mean_bound=(2 if params.greedy else 1) * mean_bound,
        worst=worst,
        forbidden=forbidden,
    )


def end_problems(
    answers: Sequence[Sequence[int]], stopped: Sequence[bool], params: SamplingParams
) -> list[str]:
    """What is wrong with the places where answers end; empty where nothing is.

    Args:
        answers: token ids.
        stopped: whether the rollout says that a stop id ended it.
        params: stop ids and the most tokens.
    """
    problems = []
    for row, (answer, flag) in enumerate(zip(answers, stopped, strict=True)):
        stops = [index for index, token in enumerate(answer) if token in params.stop_ids]
        stop = bool(stops) and stops[0] < params.max_new_tokens
        expected = stops[0] + 1 if stop else params.max_new_tokens
        if stop and len(answer) > expected:
            problems.append(f"answer {row} goes on after stop id {answer[stops[0]]}")
        elif len(answer) != expected:
            problems.append(f"answer {row} has {len(answer)} tokens, not {expected}")
        elif flag != stop:
            said = "stopped" if flag else "not stopped"
            problems.append(f"answer {row} ends with {answer[-1]} and is said to be {said}")
    return problems


def together(parts: Sequence[tuple[bool, Misses]], ends: Sequence[str], answers: int) -> Draws:
    """Findings of several rollouts as one.

    Args:
        parts: of each rollout whether it was greedy, and its tokens.
        ends: problems of all.
        answers: their number.
    """
    kinds = {
        greedy: [misses for kind, misses in parts if kind is greedy] for greedy in (True, False)
    }
    return Draws(
        sampled=_sum(kinds[False]), greedy=_sum(kinds[True]), answers=answers, ends=list(ends)
    )


def _sum(parts: Sequence[Misses]) -> Misses:
    tokens = sum(part.tokens for part in parts)
    return Misses(
        tokens=tokens,
        misses=sum(part.misses for part in parts),
        mean=sum(part.mean * part.tokens for part in parts) / max(tokens, 1),
        mean_bound=max((part.mean_bound for part in parts), default=0.0),
        worst=max((part.worst for part in parts), default=0.0),
        forbidden=sum(part.forbidden for part in parts),
    )
