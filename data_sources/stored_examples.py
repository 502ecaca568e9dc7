"""Encoded examples in files: encoded once per machine, then mapped into memory.

The files have a name that follows from everything that decides the ids: the records, each once
and in no order, tokenizer, chat format, limits and code. Another seed, order or number of passes
finds the same files.

Legend: N records of a selection, R different ones among them, I examples.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import overload

import numpy as np
from numpy.typing import NDArray

import data_sources
from data_sources.encoded import Examples
from data_sources.encodings import E, Encoding
from data_sources.parallel_encoding import encoded_chunks
from data_sources.published import published
from data_sources.records import Record
from data_sources.token_files import TokenFiles, TokenWriter
from rlhf_app.models import chat_format, turn_spans, written_formats

log = logging.getLogger(__name__)

_LIBRARIES = ("jinja2", "tokenizers", "transformers")


class StoredExamples(Examples[E]):
    """Examples in files; 14 bytes of memory for each, and 8 for each record.

    Args:
        records: of the stage, in any number of repeats.
        places_N: the place in the files of each record.
        encoding: of the stage.
        files: the encoded rows.
    """

    def __init__(
        self,
        records: Sequence[Record],
        places_N: NDArray[np.int64],
        encoding: Encoding[E],
        files: TokenFiles,
    ) -> None:
        self._records, self._encoding, self._files = records, encoding, files
        last_N = files.items_R[places_N]
        first_N = np.where(places_N > 0, files.items_R[places_N - 1], 0)
        count_N = last_N - first_N
        # Of every example its record, and its item in the files.
        self._records_I = np.repeat(np.arange(len(records), dtype=np.int32), count_N)
        before_I = np.repeat(np.cumsum(count_N) - count_N - first_N, count_N)
        self._items_I = (np.arange(len(before_I)) - before_I).astype(np.int32)
        self._codes_N = files.codes_R[places_N]
        # Indexing a memoryview gives an int.
        self.lengths = memoryview(files.lengths_I[self._items_I])
        self.highest_id = files.highest_id
        self.reasons = Counter()
        codes, first, times = np.unique(self._codes_N, return_index=True, return_counts=True)
        for place in np.argsort(first):  # in the order in which one counts record after record
            for why, each in files.reasons[codes[place]]:
                self.reasons[why] += each * int(times[place])

    def _get(self, place: int) -> E:
        item, at = int(self._items_I[place]), int(self._records_I[place])
        record, files = self._records[at], self._files
        example = self._encoding.unpack(files.packed(item), record.uid, files.margin(item))
        cut = bool(files.reasons[self._codes_N[at]])
        return self._encoding.completed(example, record, cut)

    def targets(self, place: int) -> int:
        """See `Examples`."""
        return int(self._files.targets_I[self._items_I[place]])

    def ids(self, place: int) -> list[int]:
        """See `Examples`."""
        packed = self._files.packed(int(self._items_I[place]))
        (row,) = self._encoding.rows(self._encoding.unpack(packed, "", 0.0))
        return list(row)


def stored_examples(
    records: Sequence[Record], encoding: Encoding[E], root: Path, workers: int
) -> StoredExamples[E]:
    """Finds the encoded records in the cache, or encodes them.

    Args:
        records: of the stage, in any number of repeats.
        encoding: of the stage.
        root: of the cache.
        workers: processes that encode; the result is the same for any number.

    Raises:
        ConfigError: the cache cannot be written to.
    """
    digests_R, order_R, places_N = each_once(records)

    def build(folder: Path) -> None:
        began = time.perf_counter()
        once = _Picked(records, order_R)
        with TokenWriter(folder) as writer:
            for chunk in encoded_chunks(encoding, once, workers):
                writer.append(chunk)
        seconds = time.perf_counter() - began
        log.info(
            "encoded %d rows, %d tokens, in %.0f s with %d processes: %s",
            *(len(once), writer.tokens, seconds, workers, folder.parent),
        )

    name = f"{encoding.name}-{_fingerprint(digests_R, encoding)}"
    return StoredExamples(
        records, places_N, encoding, TokenFiles(published(root / "tokens", name, build))
    )


class _Picked(Sequence[Record]):
    """Some of the records, in another order."""

    def __init__(self, records: Sequence[Record], order_R: NDArray[np.int64]) -> None:
        self._records, self._order_R = records, order_R

    def __len__(self) -> int:
        return len(self._order_R)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self._records[place] for place in self._order_R[index]]
        return self._records[self._order_R[index]]


def each_once(
    records: Iterable[Record],
) -> tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int64]]:
    """Returns what the different records are, in an order that does not depend on theirs.

    Args:
        records: in any order and number of repeats.

    Returns:
        (digest of each different record, place of one that has it, place of each record in them).
    """
    digests_N = np.frombuffer(b"".join(map(_digest, records)), dtype="V16")
    pairs_N = digests_N.view([("high", ">u8"), ("low", ">u8")])
    order_N = np.lexsort((pairs_N["low"], pairs_N["high"]))
    sorted_N = digests_N[order_N]
    new_N = np.ones(len(sorted_N), dtype=bool)
    new_N[1:] = sorted_N[1:] != sorted_N[:-1]
    places_N = np.empty(len(order_N), dtype=np.int64)
    places_N[order_N] = np.cumsum(new_N) - 1
    return sorted_N[new_N], order_N[new_N], places_N


def _digest(record: Record) -> bytes:
    """16 bytes of everything that decides the ids of a record."""
    ids = record.ids
    text = repr(
        (
            [(message.role, message.content) for message in record.messages],
            (record.response, record.chosen, record.rejected, record.margin, record.rendered),
            ids and (ids.tokenizer, ids.prompt, ids.response, ids.chosen, ids.rejected),
        )
    )
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _fingerprint(digests_R: NDArray[np.void], encoding: Encoding[E]) -> str:
    facts = encoding.facts() | {name: version(name) for name in _LIBRARIES}
    found = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode("ascii"), digest_size=16)
    for path in code_files(type(encoding)):
        found.update(path.read_bytes())
    found.update(digests_R.tobytes())
    return found.hexdigest()


def code_files(encoding: type[Encoding[E]]) -> list[Path]:
    """The files whose code decides what becomes of a record."""
    modules: tuple[ModuleType, ...] = (chat_format, turn_spans, written_formats)
    own = Path(data_sources.__file__).parent
    paths = [Path(inspect.getfile(module)) for module in modules]
    return [*sorted(own.glob("*.py")), *paths, Path(inspect.getfile(encoding))]
