"""Scorers that users bring: `module:function` or `path/to/file.py:function`.

A scorer takes two lists of equal length, prompt texts and answer texts, and returns one number
for each answer, higher for better ones. It gives the gold score of a run and ranks the answers
of `rlhf data make-pairs`. This module is free of torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_app.errors import ConfigError

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
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ConfigError(
            f"scorer {spec}: expected module:function or file.py:function, "
            "for example my_scores:politeness"
        )
    found: Any = _module(spec, source)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(
                f"scorer {spec}: {source} has no {name}; check the name after the colon"
            ) from None
    if not callable(found):
        raise ConfigError(f"scorer {spec}: {name} is a {type(found).__name__}, not a function")
    return _checked(spec, found)


def _module(spec: str, source: str) -> ModuleType:
    if source.endswith(".py"):
        return _module_of_file(spec, Path(source).expanduser())
    here = str(Path.cwd())
    if here not in sys.path:
        # Behind everything else: a file here must not replace an installed package. It stays
        # there, since a scorer may import its neighbours only when it is called.
        sys.path.append(here)
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or source
        if source == missing or source.startswith(f"{missing}."):
            raise ConfigError(
                f"scorer {spec}: no module {missing} in {here} or among the installed packages"
            ) from error
        raise ConfigError(f"scorer {spec}: {source} needs the package {missing}") from error
    except Exception as error:
        raise ConfigError(_import_failed(spec, source, error)) from error


def _module_of_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"scorer {spec}: no file {path}")
    # A name that no import statement can produce: the file never stands in for a package.
    name = f"scorer:{path.resolve()}"
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    # Dataclasses and pickle look their own module up.
    sys.modules[name] = module
    try:
        description.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(_import_failed(spec, str(path), error)) from error
    return module


def _import_failed(spec: str, source: str, error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"scorer {spec}: importing {source} failed with {type(error).__name__}: {first}"


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
