"""Rows of CSV and TSV files, which go on after a broken row."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import IO

from data_sources.raw_rows import (
    NOT_UTF8,
    BadRow,
    DataFile,
    RawRow,
    Rows,
    is_utf16,
    refuse_twice,
)
from rlhf_app.errors import ConfigError

# A field may hold a whole book; the default limit is 128 KiB.
_FIELD_LIMIT = 2**31 - 1
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
_MARK = "\ufeff"
# UTF-16's byte-order marks, as bytes that are no UTF-8 are read.
_UTF16 = ("\udcff\udcfe", "\udcfe\udcff")


def comma_separated(path: DataFile, stream: IO[bytes]) -> Rows:
    """Yields the rows of a CSV file with a header."""
    return _delimited(path, stream, ",")


def tab_separated(path: DataFile, stream: IO[bytes]) -> Rows:
    """Yields the rows of a TSV file with a header."""
    return _delimited(path, stream, "\t")


class _Lines(Iterator[str]):
    """Lines that the parser takes, of which those after a broken row's first can be read again.

    A quote that is never closed takes all lines up to the next one, or to the end of the file:
    rows that are whole would be lost with it. A byte-order mark before a row is skipped: files that
    were put together have several.
    """

    def __init__(self, text: Iterator[str]) -> None:
        self._text = text
        self._again: list[str] = []
        self._taken: list[str] = []

    def __next__(self) -> str:
        line = self._again.pop() if self._again else next(self._text)
        if not self._taken:
            line = line.removeprefix(_MARK)
        self._taken.append(line)
        return line

    def start_row(self) -> None:
        self._taken.clear()

    def give_back(self) -> None:
        self._again += reversed(self._taken[1:])


def _delimited(path: DataFile, stream: IO[bytes], delimiter: str) -> Rows:
    csv.field_size_limit(_FIELD_LIMIT)
    # Bytes that are no text become lone surrogates, which tell their rows from the others.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    lines = _Lines(text)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = 0
    while True:
        lines.start_row()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if header is None:
                raise ConfigError(f"{path}: its header is not valid: {error}") from error
            lines.give_back()
            number += 1
            yield BadRow(f"{path.name} row {number}", "not valid CSV", str(error))
            continue
        if not fields:
            continue
        if header is None:
            header = _checked_header(path, fields, delimiter)
            continue
        number += 1
        where = f"{path.name} row {number}"
        if fields[0] in header and fields != header and sorted(fields) == sorted(header):
            raise ConfigError(
                f"{path}: {where} is a header with the columns in another order; files that are "
                "put together need the same order: keep them apart, in one directory"
            )
        yield _row(where, header, fields)


def _checked_header(path: DataFile, fields: list[str], delimiter: str) -> list[str]:
    if fields[0].startswith(_UTF16):
        raise is_utf16(path)
    if any("\0" in field for field in fields):
        raise is_utf16(path, "UTF-16BE" if fields[0].startswith("\0") else "UTF-16LE")
    if not all(map(_is_text, fields)):
        raise ConfigError(
            f"{path} is not UTF-8 in its header; convert it: iconv -f WINDOWS-1252 -t UTF-8 "
            "(or what else it is in)"
        )
    other = next((mark for mark in _SEPARATORS if mark != delimiter and mark in fields[0]), None)
    if len(fields) == 1 and other is not None:
        raise ConfigError(
            f"{path}: its columns are separated by {_SEPARATORS[other]}, and .csv is read with "
            f"commas, .tsv with tabs; save it with {_SEPARATORS[delimiter]}"
            + (", or name it .tsv" if other == "\t" else "")
            + (", or name it .csv" if other == "," else "")
        )
    refuse_twice(path, fields)
    return fields


def _row(where: str, header: list[str], fields: list[str]) -> RawRow | BadRow:
    if not all(map(_is_text, fields)):
        return BadRow(where, NOT_UTF8, "")
    if fields == header:
        return BadRow(where, "the header once more", "")
    if len(fields) != len(header):
        return BadRow(where, "wrong number of columns", f"{len(fields)} instead of {len(header)}")
    return RawRow(where, dict(zip(header, fields, strict=True)))


def _is_text(field: str) -> bool:
    try:
        field.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
