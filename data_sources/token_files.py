"""Encoded rows in files of numbers, written once from start to end and then mapped into memory.

Legend: R rows, I examples (items) of them in the order of the rows, N integers of the items.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_sources.encoder import RowLost
from data_sources.encodings import Encoding
from data_sources.held_files import HeldFiles
from data_sources.records import Record

Reasons = tuple[tuple[str, int], ...]

#: Files of a directory, and the type of their numbers.
COLUMNS: dict[str, type[np.generic]] = {
    "packed": np.int32,  # N
    "ends": np.int64,  # I, where each item ends in `packed`
    "lengths": np.int32,  # I, `Encoding.length`
    "targets": np.int32,  # I, `Encoding.targets`
    "margins": np.float64,  # I
    "items": np.int64,  # R, how many items there are up to the row's last
    "reasons": np.uint16,  # R, place in the list of reasons
}
_FACTS = "facts.json"


@dataclass(frozen=True)
class Chunk:
    """Encoded neighbours: columns whose `ends`, `items` and `reasons` count from its own start.

    Attributes:
        columns: arrays by the names of `COLUMNS`.
        reasons: those that its rows have.
        highest_id: of any token.
        tokens: of all rows that a model is given.
    """

    columns: dict[str, NDArray[Any]]
    reasons: list[Reasons]
    highest_id: int
    tokens: int


def encode_chunk(encoding: Encoding[Any], records: Iterable[Record]) -> Chunk:
    """Encodes records one after the other."""
    lists: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    codes: dict[Reasons, int] = {}
    highest = tokens = 0
    packed = lists["packed"]
    for record in records:
        reasons: Counter[str] = Counter()
        try:
            examples = encoding.examples(record, reasons)
        except RowLost as lost:
            reasons[lost.reason] += 1
            examples = ()
        for example in examples:
            packed += encoding.pack(example)
            lists["ends"].append(len(packed))
            lists["lengths"].append(encoding.length(example))
            lists["targets"].append(encoding.targets(example))
            lists["margins"].append(encoding.margin(example))
            rows = encoding.rows(example)
            highest = max(highest, *(max(row, default=0) for row in rows))
            tokens += sum(map(len, rows))
        lists["items"].append(len(lists["ends"]))
        code = codes.setdefault(tuple(reasons.items()), len(codes))
        lists["reasons"].append(code)
    columns = {name: np.array(lists[name], dtype=dtype) for name, dtype in COLUMNS.items()}
    return Chunk(columns, list(codes), highest, tokens)


class TokenWriter:
    """Appends chunks to the files of a directory; a context manager.

    Args:
        folder: an existing directory.

    Attributes:
        tokens: of all rows that a model is given, so far.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reasons: dict[Reasons, int] = {}
        self._packed = self._items = self._highest = self.tokens = 0

    def __enter__(self) -> TokenWriter:
        with ExitStack() as stack:
            self._files = {
                name: stack.enter_context((self._folder / f"{name}.bin").open("wb"))
                for name in COLUMNS
            }
            self._stack = stack.pop_all()
        return self

    def append(self, chunk: Chunk) -> None:
        """Writes the rows that follow those written so far."""
        columns = dict(chunk.columns)
        codes = [self._reasons.setdefault(r, len(self._reasons)) for r in chunk.reasons]
        columns["reasons"] = np.array(codes, dtype=np.uint16)[columns["reasons"]]
        columns["ends"] = columns["ends"] + self._packed
        columns["items"] = columns["items"] + self._items
        self._packed += len(columns["packed"])
        self._items += len(columns["ends"])
        self._highest = max(self._highest, chunk.highest_id)
        self.tokens += chunk.tokens
        for name, column in columns.items():
            self._files[name].write(column.tobytes())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())  # what is published must survive a crash of the machine
        self._stack.close()
        if error is None:
            facts = {
                "reasons": list(self._reasons),
                "highest_id": self._highest,
                "tokens": self.tokens,
                "bytes": sizes(self._folder),
            }
            (self._folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def sizes(folder: Path) -> dict[str, int]:
    """Returns the bytes of each column's file."""
    return {name: (folder / f"{name}.bin").stat().st_size for name in COLUMNS}


class TokenFiles:
    """What a `TokenWriter` wrote, mapped into memory.

    Raises:
        OSError, ValueError, KeyError: a file is damaged.

    Attributes:
        lengths_I: of each item.
        targets_I: of each item.
        items_R: how many items there are up to each row's last.
        codes_R: place of each row's reasons in `reasons`.
        reasons: (reason, times) pairs; an empty tuple where a row is kept as it is.
        highest_id: of any token.
        tokens: of all rows that a model is given.
    """

    def __init__(self, folder: Path) -> None:
        # Before anything is read, so that nobody clears the directory meanwhile.
        self._held = HeldFiles(folder, [f"{name}.bin" for name in COLUMNS])
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        if facts["bytes"] != sizes(folder):
            raise ValueError("files are not as long as they were")
        columns = {name: _mapped(folder / f"{name}.bin", dtype) for name, dtype in COLUMNS.items()}
        self._packed, self._ends = columns["packed"], columns["ends"]
        self._margins = columns["margins"]
        self.lengths_I, self.targets_I = columns["lengths"], columns["targets"]
        self.items_R, self.codes_R = columns["items"], columns["reasons"]
        self.reasons: list[Reasons] = [
            tuple((why, times) for why, times in pairs) for pairs in facts["reasons"]
        ]
        self.highest_id: int = facts["highest_id"]
        self.tokens: int = facts["tokens"]

    def check(self) -> None:
        """Makes sure that the files are as they were.

        Raises:
            ConfigError: one has been changed, or cannot be read any more.
        """
        self._held.check()

    def packed(self, item: int) -> list[int]:
        """The integers of one item.

        Raises:
            ConfigError: as `check`.
        """
        self.check()
        start = int(self._ends[item - 1]) if item else 0
        ids: list[int] = self._packed[start : int(self._ends[item])].tolist()
        return ids

    def margin(self, item: int) -> float:
        """The margin of one item."""
        return float(self._margins[item])


def _mapped(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
    # An empty file cannot be mapped.
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r").view(np.ndarray)
