"""Rows of JSON files and of files with one JSON object a line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from itertools import islice
from typing import IO, Any

from data_sources.raw_rows import NOT_UTF8, BadRow, DataFile, RawRow, Rows, is_utf16
from rlhf_app.errors import ConfigError

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# The same without its mark: the start of JSON is ASCII.
_UTF16_LE = re.compile(rb"(?:\s\0)*[\[{]\0[^\0]\0")
_UTF16_BE = re.compile(rb"(?:\0\s)*\0[\[{]\0[^\0]")
_BOM = b"\xef\xbb\xbf"
_TOO_DEEP = "JSON is nested too deeply"
_LOOKED_AT = 100
_SPLITS = {"train", "training", "test", "validation", "valid", "val", "dev", "eval"}


class _Twice(dict[str, Any]):
    """An object that has a name twice, of which a row could keep only the last."""


def json_lines(path: DataFile, stream: IO[bytes]) -> Rows:
    """Yields one row per line that is not blank; a line that is no object is a bad row.

    Byte-order marks are skipped on any line: files that were put together have several.
    """
    for number, line in enumerate(stream, 1):
        if number == 1:
            _refuse_utf16(path, line)
        line = line.removeprefix(_BOM)
        if line.strip():
            yield _parsed(f"{path.name} line {number}", line)


def json_document(path: DataFile, stream: IO[bytes]) -> Rows:
    """Yields the rows of one JSON value: a list of rows, columns, or a single row.

    A file named so that holds one object a line is read line by line, broken lines included.

    Raises:
        ConfigError: neither of these.
    """
    data = stream.read().removeprefix(_BOM)
    _refuse_utf16(path, data)
    try:
        # Bytes that are no text become lone surrogates, which tell their rows from the others.
        value = _loads(data.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        if _is_lines(data):
            yield from json_lines(path, io.BytesIO(data))
            return
        raise ConfigError(f"{path} is not valid JSON: {_why(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: its {_TOO_DEEP}") from error
    damaged = not _is_utf8(data)
    for number, row in enumerate(_rows_of(path, value), 1):
        where = f"{path.name} row {number}"
        if damaged and not _is_utf8(_encoded(row)):
            yield BadRow(where, NOT_UTF8, "")
        else:
            yield _checked(where, row)


def _refuse_utf16(path: DataFile, start: bytes) -> None:
    if start.startswith(_UTF16):
        raise is_utf16(path)
    for form, name in ((_UTF16_LE, "UTF-16LE"), (_UTF16_BE, "UTF-16BE")):
        if form.match(start):
            raise is_utf16(path, name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _Twice(found)


_loads = json.JSONDecoder(object_pairs_hook=_object).decode


def _why(error: ValueError) -> str:
    # Python goes on to name a function of its own.
    return str(error).partition("; use sys.")[0]


def _parsed(where: str, line: bytes) -> RawRow | BadRow:
    if b"\0" in line:
        # Blocks of zeros are what a crash leaves of a line that was being written.
        return BadRow(where, "null bytes", f"{line.count(0)} of them")
    try:
        return _checked(where, _loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return BadRow(where, NOT_UTF8, f"byte {error.start + 1}")
    except ValueError as error:
        return BadRow(where, "not valid JSON", _why(error))
    except RecursionError:
        return BadRow(where, _TOO_DEEP, "")


def _checked(where: str, value: Any) -> RawRow | BadRow:
    if not isinstance(value, dict):
        return BadRow(where, "not an object with columns", type(value).__name__)
    if isinstance(value, _Twice):
        return BadRow(where, "a column is there twice", "")
    return RawRow(where, value)


def _is_lines(data: bytes) -> bool:
    """Whether at least half of the first lines are objects by themselves."""
    lines = list(islice((line for line in data.splitlines() if line.strip()), _LOOKED_AT))
    objects = sum(isinstance(_parsed("", line), RawRow) for line in lines)
    return objects > 0 and 2 * objects >= len(lines)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _encoded(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _rows_of(path: DataFile, value: Any) -> Iterable[Any]:
    """Accepts a list of rows, one object around such a list, columns, or a single row."""
    if isinstance(value, list):
        return value
    if isinstance(value, _Twice):
        raise ConfigError(f"{path}: a name is there twice in its object; rename all but one")
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path} holds one value of type {type(value).__name__}; a list of rows is needed"
        )
    lists = {key: item for key, item in value.items() if isinstance(item, list)}
    of_rows = [item for item in lists.values() if item and all(isinstance(r, dict) for r in item)]
    if len(value) == 1 and of_rows:
        return of_rows[0]
    splits = [key for key in lists if key in _SPLITS]
    if of_rows and len(splits) == len(lists):
        raise ConfigError(
            f"{path} holds lists of rows under {', '.join(splits)}; write each into a file of its "
            "own in one directory, such as train.json and test.json, and name the directory"
        )
    if len(lists) == len(value) > 0 and not of_rows:
        if len({len(item) for item in lists.values()}) != 1:
            raise ConfigError(f"{path}: its columns have different lengths; write a list of rows")
        return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    return [value]
