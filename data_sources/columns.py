"""Columns of other names: `data.sources[].columns`, as ours: theirs, nested ones by dots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from data_sources.fields import listed
from data_sources.raw_rows import BadRow, RawRow
from rlhf_app.errors import ConfigError

_ABSENT = object()
_DEEPEST = 3


def mapped(
    source: str,
    first: Sequence[RawRow | BadRow],
    rest: Iterable[RawRow | BadRow],
    columns: Mapping[str, str],
) -> tuple[list[RawRow | BadRow], Iterator[RawRow | BadRow]]:
    """Returns the first rows and the rest with columns under our names.

    A mapped name wins over a column that has it already.

    Args:
        source: the source's name, for messages.
        first: raw rows.
        rest: those after them.
        columns: ours -> theirs; `a.b` is b inside the object a, `a.0` the first item of a list. A
            column that has the whole name comes first.

    Raises:
        ConfigError: none of the first rows has a column that is named.
    """
    if not columns:
        return list(first), iter(rest)
    renamed = [_renamed(row, columns) for row in first]
    found = {name for row in renamed if isinstance(row, RawRow) for name in row.values}
    for ours, theirs in columns.items():
        if found and ours not in found:
            theirs_found = [row.values for row in first if isinstance(row, RawRow)]
            raise ConfigError(
                f"data source {source}: data.sources[].columns names {theirs!r} for {ours}, "
                f"but the columns are {listed(_names(theirs_found, nested='.' in theirs))}"
            )
    return renamed, (_renamed(row, columns) for row in rest)


def _renamed(row: RawRow | BadRow, columns: Mapping[str, str]) -> RawRow | BadRow:
    return _mapped(row, columns) if isinstance(row, RawRow) else row


def _mapped(row: RawRow, columns: Mapping[str, str]) -> RawRow:
    taken = set(columns.values())
    values = {k: v for k, v in row.values.items() if k not in taken and k not in columns}
    for ours, theirs in columns.items():
        value = _value(row.values, theirs)
        if value is not _ABSENT:
            values[ours] = value
    return RawRow(row.where, values)


def _value(row: Mapping[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _ABSENT
    return value


def _names(rows: Sequence[Mapping[str, Any]], *, nested: bool) -> list[str]:
    names: dict[str, None] = {}
    for row in rows:
        _collect(row, "", _DEEPEST if nested else 1, names)
    return sorted(names)


def _collect(row: Mapping[str, Any], before: str, depth: int, names: dict[str, None]) -> None:
    for name, value in row.items():
        if depth > 1 and isinstance(value, Mapping) and value:
            _collect(value, f"{before}{name}.", depth - 1, names)
        else:
            names[f"{before}{name}"] = None
