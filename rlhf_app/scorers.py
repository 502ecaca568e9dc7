"""Scorers that users bring: `module:function` or `path/to/file.py:function`.

A scorer takes two lists of equal length, prompt texts and answer texts, and returns one number
for each answer, higher for better ones. It gives the gold score of a run and ranks the answers
of `rlhf data make-pairs`. This module is free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from rlhf_app.errors import ConfigError
from rlhf_app.functions import load_function

Scorer = Callable[[list[str], list[str]], list[float]]


def load_scorer(spec: str) -> Scorer:
    """Finds a scorer; what it returns is checked at every call.

    Args:
        spec: `module:function`, where the current directory is importable too, or
            `path/to/file.py:function`. A dotted function is looked up part by part.

    Returns:
        The scorer. Calling it raises ConfigError unless it gives one finite number per answer.

    Raises:
        ConfigError: bad spec, no such module, file or function; or an import that fails.
    """
    return _checked(spec, load_function("scorer", spec, "my_scores:politeness"))


def _checked(spec: str, function: Callable[[list[str], list[str]], Iterable[Any]]) -> Scorer:
    """Wraps a user's function so that bad scores stop the run where they arise."""

    def score(prompts: list[str], responses: list[str]) -> list[float]:
        values = _as_list(spec, function(prompts, responses))
        if len(values) != len(responses):
            raise ConfigError(
                f"scorer {spec}: returned {len(values)} scores for {len(responses)} answers; "
                "return one for each"
            )
        return [_number(spec, row, value, responses[row]) for row, value in enumerate(values)]

    return score


def _as_list(spec: str, values: Iterable[Any]) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise ConfigError(
            f"scorer {spec}: returned a {type(values).__name__}; return a list of numbers"
        ) from None


def _number(spec: str, row: int, value: Any, response: str) -> float:
    shown = repr(response if len(response) <= 60 else response[:57] + "...")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"scorer {spec}: row {row} scored {value!r}, not a number (answer {shown})"
        ) from None
    if not math.isfinite(number):
        raise ConfigError(
            f"scorer {spec}: row {row} scored {number}, not a finite number (answer {shown})"
        )
    return number
