"""Normalisers that users bring: a function from a raw row to records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any

from data_sources import normalise
from data_sources.counts import LEFT_OUT
from data_sources.fields import RowError, listed
from data_sources.named import find
from data_sources.normalise import Columns, Normalised
from data_sources.records import Record
from data_sources.shapes import Shape
from rlhf_app.config.functions import names_function
from rlhf_app.errors import ConfigError
from rlhf_app.functions import load_function, same_directory

FAILED = "the normaliser failed"
_KEYS = ("prompt", "messages", "system", "input", "response", "chosen", "rejected", "margin")


def custom_shape(spec: str) -> Shape | None:
    """Returns the shape that a normaliser gives.

    Args:
        spec: `module:function` or `file.py:function`, called with each row as a dict; or the id of
            a known dataset, whose normaliser a local copy of it needs.

    Returns:
        The shape; None where a known dataset is recognised by its columns.

    Raises:
        ConfigError: there is no such function or dataset.
    """
    known = find(spec)
    if known is not None:
        return known.as_shape()
    if not names_function(spec):
        raise ConfigError(
            f"data normaliser {spec}: expected module:function, file.py:function or the Hub id of "
            "a known dataset (docs/data.md lists them)"
        )
    function = load_function("data normaliser", spec, "my_data:to_record")
    return Shape(f"normaliser {spec}", _calling(function), {})


def _calling(
    function: Callable[..., Any],
) -> Callable[[Mapping[str, Any], Columns, bool], Normalised]:
    def normalised(row: Mapping[str, Any], columns: Columns, verbatim: bool) -> Normalised:
        try:
            with same_directory():
                made = function(dict(row))
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}"[:80]
            raise RowError(FAILED, f"{what}{_line_of(error)}") from error
        items = [] if made is None else made if isinstance(made, list | tuple) else [made]
        results = [_record(item, verbatim) for item in items]
        if not results:
            raise RowError(LEFT_OUT)
        records: tuple[Record, ...] = sum((one.records for one in results), ())
        return Normalised(records, sum((one.notes for one in results), ()))

    return normalised


def _line_of(error: BaseException) -> str:
    """Returns where the user's code raised it, as in " (my_rows.py, line 3)"."""
    frames = extract_tb(error.__traceback__)[1:]  # the first is ours
    if not frames:
        return ""
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _record(item: object, verbatim: bool) -> Normalised:
    """Reads one object with our keys; what it holds decides which kind of record it is."""
    if not isinstance(item, Mapping):
        raise RowError("the normaliser's record is not a dict", type(item).__name__)
    unknown = [str(key) for key in item if key not in _KEYS]
    if unknown:
        raise RowError(
            "the normaliser's record has unknown keys",
            f"{listed(unknown)}; known: {', '.join(_KEYS)}",
        )
    row = {str(key): value for key, value in item.items() if value is not None}
    columns = {key: key for key in row}
    sides = [side for side in ("chosen", "rejected") if side in row]
    if len(sides) == 1:
        raise RowError(f"the normaliser's record has {sides[0]} without its counterpart")
    if sides and not {"prompt", "messages"} & row.keys():
        return normalise.transcripts(row, columns, verbatim)
    if sides:
        return normalise.preference(row, columns, verbatim)
    if "prompt" not in row and "messages" in row and "response" in row:
        columns["prompt"] = "messages"
    if "prompt" in columns and "response" in row:
        return normalise.prompt_response(row, columns, verbatim)
    if "prompt" in columns:
        return normalise.prompt_only(row, columns, verbatim)
    if "messages" in columns:
        return normalise.conversation(row, columns, verbatim)
    raise RowError("the normaliser's record has neither prompt nor messages")
