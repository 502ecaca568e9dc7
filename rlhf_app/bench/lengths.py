"""Lengths of the answers of a benchmark: all equal, or as real answers vary."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from rlhf_app.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """How long answers are.

    Attributes:
        mean: of a geometric distribution, before cutting; None: every answer has full length.
    """

    mean: float | None = None

    def draw(self, count: int, longest: int, seed: int) -> list[int]:
        """Lengths of `count` answers: min(geometric(1 / mean), longest), each at least 1."""
        if self.mean is None:
            return [longest] * count
        source = random.Random(seed)
        return [min(longest, _geometric(1 / self.mean, source)) for _ in range(count)]


def _geometric(chance: float, source: random.Random) -> int:
    """Tries up to the first success, it included (Devroye 1986, inversion)."""
    if chance >= 1:
        return 1
    return 1 + int(math.log1p(-source.random()) / math.log1p(-chance))


def parse_lengths(text: str) -> AnswerLengths:
    """Reads `fixed`, or `geometric:MEAN`.

    Raises:
        ConfigError: anything else.
    """
    kind, _, mean = text.partition(":")
    if kind == "fixed" and not mean:
        return AnswerLengths()
    try:
        value = float(mean)
    except ValueError:
        value = math.nan
    if kind == "geometric" and 1 <= value < math.inf:
        return AnswerLengths(value)
    raise ConfigError(
        f"--answer-lengths {text}: give fixed, or geometric:MEAN with a mean of at least 1"
    )
