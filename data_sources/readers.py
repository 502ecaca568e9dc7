"""Raw rows out of files: JSON, JSONL, CSV, TSV, Parquet and Arrow, plain, .gz or .zst.

A row that cannot be parsed becomes a `BadRow` and reading goes on. Only a file that cannot be
read to its end is an error: how many rows a cut or damaged file has lost, nobody can count.
Directories of such files, `save_to_disk` directories and Hub ids are handled by
`data_sources.sources`.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import IO, Any

from data_sources.compressed import is_compressed, opened, plain_name
from data_sources.delimited_rows import comma_separated, tab_separated
from data_sources.json_rows import json_document, json_lines
from data_sources.raw_rows import NOT_UTF8, BadRow, DataFile, RawRow, Rows, refuse_twice
from data_sources.remote import RemoteFile
from rlhf_app.errors import ConfigError
from rlhf_app.url_secrets import without_secrets

_AGAIN = "copy or download it again"


def suffix_of(path: DataFile) -> str:
    """Returns the lower-case suffix that decides the format: ".jsonl" for "a.jsonl.gz"."""
    return Path(plain_name(path.name)).suffix


def is_data_file(path: DataFile) -> bool:
    """Returns whether `read_file` knows the file's suffix."""
    return suffix_of(path) in _READERS


def read_file(path: Path | RemoteFile) -> Rows:
    """Yields the rows of one file, in its order.

    Raises:
        ConfigError: unknown suffix, unreadable file, or JSON that is neither a list of rows,
            nor columns, nor one row per line.
    """
    reader = _READERS.get(suffix_of(path))
    if reader is None:
        raise ConfigError(
            f"{path}: unknown file type; use one of {', '.join(sorted(_READERS))}, plain, .gz or "
            ".zst"
        )
    number = 0
    try:
        with opened(path) as stream:
            for number, row in enumerate(reader(path, stream), 1):  # noqa: B007
                yield row
    except gzip.BadGzipFile as error:
        raise ConfigError(
            f"{path} cannot be read: it is no gzip file; leave .gz out of its name, or compress it"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = without_secrets(" ".join(str(getattr(error, "strerror", None) or error).split()))
        broken = number or not isinstance(error, FileNotFoundError | PermissionError)
        rows = f"beyond row {number}" if number else "from the first row on"
        beyond = f" {rows}: {_AGAIN}" if broken else ""
        raise ConfigError(f"{path} cannot be read{beyond}: {reason}") from error


def _parquet(path: DataFile, stream: IO[bytes]) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        batches = pq.ParquetFile(_seekable(path, stream)).iter_batches()
        yield from _arrow_rows(path, batches)
    except pa.ArrowException as error:
        raise ConfigError(_no_arrow(path, "a Parquet", error)) from error


def _arrow(path: DataFile, stream: IO[bytes]) -> Rows:
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
        raise ConfigError(_no_arrow(path, "an Arrow", error)) from error


def _no_arrow(path: DataFile, what: str, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{path} is not {what} file, or it is cut: {_AGAIN} ({reason})"


def _seekable(path: DataFile, stream: IO[bytes]) -> IO[bytes]:
    if is_compressed(path.name) or not stream.seekable():
        return io.BytesIO(stream.read())
    return stream


def _arrow_rows(path: DataFile, batches: Iterable[Any]) -> Rows:
    number = 0
    for batch in batches:
        refuse_twice(path, batch.schema.names)
        for values in _values(batch):
            number += 1
            where = f"{path.name} row {number}"
            if isinstance(values, UnicodeDecodeError):
                yield BadRow(where, NOT_UTF8, str(values))
            elif isinstance(values, Exception):
                yield BadRow(where, "unreadable value", str(values))
            else:
                yield RawRow(where, values)


def _values(batch: Any) -> Iterable[Any]:
    """Returns each row's values, or the error where Python cannot hold one of them.

    Such are bytes that are no text, and dates beyond Python's years.
    """
    try:
        rows: list[Any] = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            return [error]
        return chain.from_iterable(_values(batch.slice(i, 1)) for i in range(len(batch)))
    return rows


_READERS: dict[str, Callable[[DataFile, IO[bytes]], Rows]] = {
    ".json": json_document,
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".csv": comma_separated,
    ".tsv": tab_separated,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
