"""From several scored answers to one prompt to pairs of a better and a worse one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """One sampled answer.

    Attributes:
        ids: its tokens, with the stop token where one was sampled.
        text: the same without special tokens.
        score: what the scorer gave it.
    """

    ids: tuple[int, ...]
    text: str
    score: float


def ranked_pairs(
    answers: Sequence[ScoredAnswer], min_gap: float, limit: int | None
) -> list[tuple[ScoredAnswer, ScoredAnswer]]:
    """Returns (better, worse) pairs whose scores differ by more than `min_gap`.

    The widest gap comes first, so that a limit of 1 gives the best and the worst answer; equal
    gaps keep the order of the answers.

    Args:
        answers: the answers to one prompt.
        min_gap: >= 0, in the scorer's units. 0 leaves out ties only.
        limit: most pairs; None is all.
    """
    pairs = [(a, b) for a, b in permutations(answers, 2) if a.score - b.score > min_gap]
    pairs.sort(key=lambda pair: pair[1].score - pair[0].score)
    return pairs[:limit]


def best_answer(answers: Sequence[ScoredAnswer]) -> ScoredAnswer | None:
    """Returns the answer with the highest score, the first of equals; None if there is none."""
    return max(answers, key=lambda answer: answer.score, default=None)
