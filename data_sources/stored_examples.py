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
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

import data_sources
from data_sources.different_records import each_once, uid_of
from data_sources.encoded import Examples
from data_sources.encodings import E, Encoding
from data_sources.processes import in_order
from data_sources.published import opened
from data_sources.records import Record
from data_sources.selection import Selected
from data_sources.token_files import Chunk, TokenFiles, TokenWriter, encode_chunk
from rlhf_app.models import chat_format, turn_spans, written_formats

log = logging.getLogger(__name__)

#: Rows of a task: enough that handing it over costs nothing, few enough to lie in memory.
CHUNK_ROWS = 2_000
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
        uid, files = uid_of(self._records, at), self._files
        example = self._encoding.unpack(files.packed(item), uid, files.margin(item))
        cut = bool(files.reasons[self._codes_N[at]])
        return self._encoding.completed(example, self._records, at, cut)

    def targets(self, place: int) -> int:
        """See `Examples`."""
        self._files.check()
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
    identity, once, places_N = each_once(records)

    def build(folder: Path) -> str:
        began = time.perf_counter()
        with (
            TokenWriter(folder) as writer,
            closing(encoded_chunks(encoding, once, workers)) as chunks,
        ):
            for chunk in chunks:
                writer.append(chunk)
        seconds = time.perf_counter() - began
        log.info(
            "encoded %d rows, %d tokens, in %.0f s with %d processes: %s",
            *(len(once), writer.tokens, seconds, workers, folder.parent),
        )
        return _in_words(once, encoding)

    name = f"{encoding.name}-{_fingerprint(identity, encoding)}"
    files = opened(root / "tokens", name, build, TokenFiles)
    return StoredExamples(records, places_N, encoding, files)


def encoded_chunks(
    encoding: Encoding[E], records: Sequence[Record], workers: int
) -> Generator[Chunk, None, None]:
    """Yields the records' chunks in their order; see `in_order`."""
    starts = range(0, len(records), CHUNK_ROWS)
    parts = (records[start : start + CHUNK_ROWS] for start in starts)
    return in_order(partial(encode_chunk, encoding), parts, workers)


def _in_words(once: Sequence[Record], encoding: Encoding[E]) -> str:
    sources = dict.fromkeys(record.source for record in _one_of_each(once))
    return (
        f"{len(once)} rows of {', '.join(filter(None, sources)) or 'unnamed sources'}, at most "
        f"{encoding.limit} tokens of {encoding.fmt.tokenizer.name_or_path or 'a tokenizer'}"
    )


def _one_of_each(records: Sequence[Record]) -> Sequence[Record]:
    """One record of each source, or of all the first."""
    if isinstance(records, Selected):
        _, first = np.unique(records.table_N, return_index=True)
        return [records[int(place)] for place in first]
    return records[:1]


def _fingerprint(identity: bytes, encoding: Encoding[E]) -> str:
    facts = encoding.facts() | {name: version(name) for name in _LIBRARIES}
    found = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode("ascii"), digest_size=16)
    for path in code_files(type(encoding)):
        found.update(path.read_bytes())
    found.update(identity)
    return found.hexdigest()


def code_files(encoding: type[Encoding[E]]) -> list[Path]:
    """The files whose code decides what becomes of a record."""
    modules: tuple[ModuleType, ...] = (chat_format, turn_spans, written_formats)
    own = Path(data_sources.__file__).parent
    paths = [Path(inspect.getfile(module)) for module in modules]
    return [*sorted(own.glob("*.py")), *paths, Path(inspect.getfile(encoding))]
