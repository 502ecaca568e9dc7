"""Raw rows out of files: JSON, JSONL, CSV, TSV, Parquet and Arrow, plain or gzipped.

A line that cannot be parsed becomes a `BadRow` and reading goes on; only a file that cannot be
read as a whole is an error. Directories of such files, `save_to_disk` directories and Hub ids
are handled by `data_sources.collections`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from rlhf_app.errors import ConfigError

# A field of a CSV file may hold a whole book; the default limit is 128 KiB.
_CSV_FIELD_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as its file has it; `where` names file and line (or row) for messages."""

    where: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no row: cannot be parsed, or is not an object with columns."""

    where: str
    reason: str
    detail: str


Rows = Iterator[RawRow | BadRow]


def suffix_of(path: Path) -> str:
    """Returns the lower-case suffix that decides the format: ".jsonl" for "a.jsonl.gz"."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def is_data_file(path: Path) -> bool:
    """Returns whether `read_file` knows the file's suffix."""
    return suffix_of(path) in _READERS


def read_file(path: Path) -> Rows:
    """Yields the rows of one file, in its order.

    Raises:
        ConfigError: unknown suffix, unreadable file, or JSON that is neither a list of rows,
            nor columns, nor one row per line.
    """
    reader = _READERS.get(suffix_of(path))
    if reader is None:
        raise ConfigError(
            f"{path}: unknown file type; use one of {', '.join(sorted(_READERS))}, plain or .gz"
        )
    try:
        with _opened(path) as stream:
            yield from reader(path, stream)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}") from error


def _opened(path: Path) -> IO[bytes]:
    if path.name.lower().endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return open(path, "rb")


def _jsonl(path: Path, stream: IO[bytes]) -> Rows:
    for number, line in enumerate(stream, 1):
        where = f"{path.name} line {number}"
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:  # includes UnicodeDecodeError
            yield BadRow(where, "not valid JSON", str(error))
            continue
        except RecursionError:
            yield BadRow(where, "JSON is nested too deeply", "")
            continue
        yield _row(where, value)


def _json(path: Path, stream: IO[bytes]) -> Rows:
    data = stream.read()
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except ValueError as error:
        # Many files named .json hold one row per line.
        if "Extra data" in str(error):
            yield from _jsonl(path, io.BytesIO(data))
            return
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: its JSON is nested too deeply") from error
    for number, row in enumerate(_rows_of_json(path, value), 1):
        yield _row(f"{path.name} row {number}", row)


def _rows_of_json(path: Path, value: Any) -> Iterable[Any]:
    """Accepts a list of rows, one object around such a list, columns, or a single row."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; a list of rows is needed")
    lists = {key: item for key, item in value.items() if isinstance(item, list)}
    of_rows = [item for item in lists.values() if item and all(isinstance(r, dict) for r in item)]
    if len(value) == 1 and of_rows:
        return of_rows[0]
    if len(lists) == len(value) > 0 and not of_rows:
        if len({len(item) for item in lists.values()}) != 1:
            raise ConfigError(f"{path}: its columns have different lengths; write a list of rows")
        return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    return [value]


def _delimited(path: Path, stream: IO[bytes], delimiter: str) -> Rows:
    csv.field_size_limit(_CSV_FIELD_LIMIT)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    number = 0
    while True:
        number += 1
        where = f"{path.name} row {number}"
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield BadRow(where, "not valid CSV", str(error))
            continue
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} is not UTF-8: {error}; convert it, e.g. with iconv"
            ) from error
        if None in values or None in values.values():
            found = sum(v is not None for v in values.values())
            yield BadRow(where, "wrong number of columns", f"{found} or more fields")
            continue
        yield RawRow(where, values)


def _csv(path: Path, stream: IO[bytes]) -> Rows:
    return _delimited(path, stream, ",")


def _tsv(path: Path, stream: IO[bytes]) -> Rows:
    return _delimited(path, stream, "\t")


def _parquet(path: Path, stream: IO[bytes]) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        batches = pq.ParquetFile(_seekable(path, stream)).iter_batches()
        yield from _arrow_rows(path, batches)
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is not a Parquet file: {error}") from error


def _arrow(path: Path, stream: IO[bytes]) -> Rows:
    import pyarrow as pa

    source = _seekable(path, stream)
    try:
        # `datasets` writes streams; pandas and pyarrow write files ("ARROW1").
        magic = source.read(6)
        source.seek(0)
        if magic == b"ARROW1":
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
            yield from _arrow_rows(path, batches)
        else:
            yield from _arrow_rows(path, pa.ipc.open_stream(source))
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is not an Arrow file: {error}") from error


def _seekable(path: Path, stream: IO[bytes]) -> IO[bytes]:
    return io.BytesIO(stream.read()) if path.name.lower().endswith(".gz") else stream


def _arrow_rows(path: Path, batches: Iterable[Any]) -> Rows:
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            yield RawRow(f"{path.name} row {number}", values)


def _row(where: str, value: Any) -> RawRow | BadRow:
    if not isinstance(value, dict):
        return BadRow(where, "not an object with columns", type(value).__name__)
    return RawRow(where, value)


_READERS: dict[str, Callable[[Path, IO[bytes]], Rows]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
