"""Records of a source in files: an Arrow file of their texts, and arrays of what decides on them.

Written once from start to end, then mapped into memory: only the pages that are read are in it,
and processes on one machine share them.

Legend: N records.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from data_sources.counts import SourceCounts
from data_sources.held_files import HeldFiles, lost
from data_sources.identity import prompt_key
from data_sources.raw_rows import BadRow, RawRow
from data_sources.record_table import RecordTable, hexadecimal
from data_sources.records import Message, Record, Role, TokenIds
from data_sources.row_maker import RowMaker

#: Rows of a batch at most; one row of it is decoded to get at one record.
_BATCH = 256
_TEXTS = "records.arrow"
_FACTS = "facts.json"
_NUMBERS: dict[str, type[np.generic]] = {
    "uids": np.uint64,
    "keys": np.uint64,
    "has_answer": np.bool_,
    "is_pair": np.bool_,
}
_ENDS = "ends"
_IDS = ("prompt", "response", "chosen", "rejected")


class StoredRecords(RecordTable):
    """Records in the files of a directory that `write_records` filled.

    Args:
        folder: the directory; its name becomes the fingerprint.

    Raises:
        OSError, ValueError: the files are not whole; later, in reading, it is a ConfigError.
    """

    def __init__(self, folder: Path) -> None:
        # Before anything is read, so that nobody clears the directory meanwhile.
        names = (_TEXTS, *(f"{name}.bin" for name in _NUMBERS))
        self._held = HeldFiles(folder, names)
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        for name, size in facts["sizes"].items():
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{folder / name} is not {size} bytes long")
        self._folder, self._source = folder, facts["source"]
        self.counts = _counts(facts["counts"])
        self.uids_N, self.keys_N, self.has_answer_N, self.is_pair_N = (
            np.memmap(folder / f"{name}.bin", dtype, "r")
            if facts["counts"]["records"]
            else np.empty(0, dtype)
            for name, dtype in _NUMBERS.items()
        )
        # Of every batch, how many records there are up to its last.
        self._ends = np.fromfile(folder / f"{_ENDS}.bin", np.int64)
        self._texts = _opened(folder / _TEXTS)

    @property
    def fingerprint(self) -> str:
        """The name of the directory, which follows from all that decides the records."""
        return self._folder.name

    def __iter__(self) -> Iterator[Record]:
        place = 0
        for number in range(len(self._ends)):
            with self._held.reading():
                rows = self._texts.get_batch(number).to_pylist()
            for row in rows:
                yield self._record(row, place)
                place += 1

    def __getstate__(self) -> Path:
        return self._folder

    def __setstate__(self, folder: Path) -> None:
        try:
            self.__init__(folder)  # type: ignore[misc]
        except (OSError, ValueError, KeyError) as error:
            raise lost(folder, str(error)) from error

    def _get(self, place: int) -> Record:
        number = int(np.searchsorted(self._ends, place, side="right"))
        with self._held.reading():
            batch = self._texts.get_batch(number)
            (row,) = batch.slice(place - int(self._ends[number]) + len(batch), 1).to_pylist()
            return self._record(row, place)

    def _record(self, row: dict[str, Any], place: int) -> Record:
        ids = None
        if row["tokenizer"] is not None:
            parts = {name: tuple(row[f"{name}_ids"]) for name in _IDS}
            ids = TokenIds(row["tokenizer"], **parts)
        turns = zip(row["roles"], row["contents"], strict=True)
        return Record(
            tuple(Message(_role(role), _text(content)) for role, content in turns),
            response=_optional(row["response"]),
            chosen=_optional(row["chosen"]),
            rejected=_optional(row["rejected"]),
            margin=row["margin"],
            rendered=row["rendered"],
            source=self._source,
            uid=hexadecimal(int(self.uids_N[place])),
            ids=ids,
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """Records as bytes, with what became of the rows that they were made of.

    Attributes:
        batches: of the Arrow file, each as a message.
        rows: of each batch.
        numbers: of all records, by the names of the files.
        counts: of these rows.
    """

    batches: list[bytes]
    rows: list[int]
    numbers: dict[str, bytes]
    counts: SourceCounts


def packed(maker: RowMaker, rows: Sequence[tuple[RawRow | BadRow, int]]) -> Packed:
    """Makes the records of rows that follow each other.

    Args:
        maker: of the source.
        rows: as for `RowMaker.records`.
    """
    import pyarrow as pa

    schema, counts = _schema(), SourceCounts("")
    records = list(maker.records(rows, counts))
    parts = [records[start : start + _BATCH] for start in range(0, len(records), _BATCH)]
    batches = [pa.RecordBatch.from_pylist(list(map(_row, part)), schema) for part in parts]
    numbers = {
        name: np.array(values, dtype=_NUMBERS[name]).tobytes()
        for name, values in _numbers(records).items()
    }
    return Packed(
        [batch.serialize().to_pybytes() for batch in batches],
        list(map(len, parts)),
        numbers,
        counts,
    )


def write_records(folder: Path, source: str, parts: Iterable[Packed], counts: SourceCounts) -> None:
    """Fills a directory for `StoredRecords`; one part is in memory at a time.

    Args:
        folder: an empty directory.
        source: the source's name in the records.
        parts: of the records, in their order.
        counts: of the source; those of the parts are added.

    Raises:
        OSError: they cannot be written.
    """
    import pyarrow as pa

    schema, ends, number = _schema(), [], 0
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in _NUMBERS
        }
        sink = stack.enter_context(pa.OSFile(str(folder / _TEXTS), "wb"))
        texts = stack.enter_context(pa.ipc.new_file(sink, schema))
        for part in parts:
            counts.add(part.counts)
            for batch, rows in zip(part.batches, part.rows, strict=True):
                texts.write_batch(pa.ipc.read_record_batch(batch, schema))
                number += rows
                ends.append(number)
            for name, values in part.numbers.items():
                files[name].write(values)
    np.array(ends, dtype=np.int64).tofile(folder / f"{_ENDS}.bin")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    counted = {field.name: getattr(counts, field.name) for field in fields(counts)}
    facts = {"source": source, "counts": counted, "sizes": sizes}
    # What a crash of the machine could leave half written has other sizes.
    with (folder / _FACTS).open("w", encoding="utf-8") as sheet:
        json.dump(facts, sheet)
        sheet.flush()
        os.fsync(sheet.fileno())


def _opened(path: Path) -> Any:
    """Opened once and for all: later the path may be gone, and what is open stays."""
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(path)))


def _schema() -> Any:
    import pyarrow as pa

    # Texts are bytes here: what JSON's escapes can write (half of a surrogate pair) is no UTF-8.
    return pa.schema(
        [
            ("roles", pa.list_(pa.string())),
            ("contents", pa.list_(pa.binary())),
            ("response", pa.large_binary()),
            ("chosen", pa.large_binary()),
            ("rejected", pa.large_binary()),
            ("margin", pa.float64()),
            ("rendered", pa.bool_()),
            ("tokenizer", pa.string()),
            *((f"{name}_ids", pa.list_(pa.int32())) for name in _IDS),
        ]
    )


def _numbers(batch: list[Record]) -> dict[str, list[int] | list[bool]]:
    return {
        "uids": [int(record.uid, 16) for record in batch],
        "keys": [int(prompt_key(record.messages), 16) for record in batch],
        "has_answer": [record.sft_target is not None for record in batch],
        "is_pair": [record.is_pair for record in batch],
    }


def _row(record: Record) -> dict[str, Any]:
    ids = record.ids
    return {
        "roles": [message.role for message in record.messages],
        "contents": [_bytes(message.content) for message in record.messages],
        "response": _bytes(record.response),
        "chosen": _bytes(record.chosen),
        "rejected": _bytes(record.rejected),
        "margin": record.margin,
        "rendered": record.rendered,
        "tokenizer": None if ids is None else ids.tokenizer,
        **{f"{name}_ids": None if ids is None else getattr(ids, name) for name in _IDS},
    }


def _counts(values: dict[str, Any]) -> SourceCounts:
    counters = {name: Counter(values[name]) for name in ("unusable", "notes")}
    return SourceCounts(**(values | counters))


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")


def _optional(value: bytes | None) -> str | None:
    return None if value is None else _text(value)


def _role(value: str) -> Role:
    return value  # type: ignore[return-value]
