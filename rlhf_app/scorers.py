"""Scorers that users bring: `module:function` or `path/to/file.py:function`.

A scorer takes two lists of equal length, prompt texts and answer texts, and returns one number
for each answer, higher for better ones. It gives the gold score of a run and ranks the answers
of `rlhf data make-pairs`. This module is free of torch.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from rlhf_app.errors import ConfigError
from rlhf_app.functions import load_function, same_directory

Scorer = Callable[[list[str], list[str]], list[float]]


def load_scorer(spec: str) -> Scorer:
    """Finds a scorer; what it returns is checked at every call.

    Args:
        spec: `module:function`, where the current directory is importable too, or
            `path/to/file.py:function`. A dotted function is looked up part by part.

    Returns:
        The scorer. Calling it raises ConfigError unless it gives one finite number per answer;
        so does a function that raises, or that calls sys.exit.

    Raises:
        ConfigError: bad spec, no such module, file or function; or an import that fails.
    """
    return _checked(spec, load_function("scorer", spec, "my_scores:politeness"))


def _checked(spec: str, function: Callable[[list[str], list[str]], Iterable[Any]]) -> Scorer:
    """Wraps a user's function so that bad scores stop the run where they arise."""

    def score(prompts: list[str], responses: list[str]) -> list[float]:
        try:
            with same_directory():
                # Copies: what it does to its lists must not reach the next scorer.
                found = function(list(prompts), list(responses))
                values = list(_iterable(spec, found))  # a generator runs only now
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"scorer {spec}: {_raised(error)}") from error
        if len(values) != len(responses):
            raise ConfigError(
                f"scorer {spec}: returned {len(values)} scores for {len(responses)} answers; "
                "return one for each"
            )
        return [_number(spec, row, value, responses[row]) for row, value in enumerate(values)]

    return score


def _iterable(spec: str, values: Iterable[Any]) -> Iterable[Any]:
    """Refuses what has no order, or whose items are no scores though they may be numbers."""
    try:
        if not isinstance(values, str | bytes | bytearray | Mapping | Set):
            return iter(values)
    except TypeError:
        pass
    raise ConfigError(
        f"scorer {spec}: returned a {type(values).__name__}; return a list of numbers"
    )


def _raised(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0]
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {first} ({last.filename}, line {last.lineno})"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _number(spec: str, row: int, value: Any, response: str) -> float:
    shown = repr(_short(response))
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"scorer {spec}: row {row} scored {_short(repr(value))}, not a number (answer {shown})"
        ) from None
    if not math.isfinite(number):
        raise ConfigError(
            f"scorer {spec}: row {row} scored {number}, not a finite number (answer {shown})"
        )
    return number
