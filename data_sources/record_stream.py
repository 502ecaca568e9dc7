"""Training records that are read while training goes on, and kept nowhere.

For data larger than the disk, or that takes too long to read before the first step. What is in
memory is a block of rows and a shuffle buffer of each source. Everything follows from the rows
and the seed: every rank sees the same stream, and so does a run that starts again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from data_sources.counts import SourceCounts
from data_sources.record_table import ListedRecords, RecordTable
from data_sources.records import Record
from rlhf_app.errors import ConfigError

#: Rows that are read and looked at together.
BLOCK_ROWS = 1_000

#: Opens a source at its start; counts what becomes of its rows, and stops where too many are bad.
Opened = Callable[[SourceCounts], Iterable[Record]]
#: Whether each record of a table is trained on.
Wanted = Callable[[RecordTable], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class StreamedSource:
    """One source of a stream.

    Attributes:
        name: for messages.
        open: opens it at its start.
        weight: its share of the stream is as this.
    """

    name: str
    open: Opened
    weight: float


class RecordStream(Iterable[Record]):
    """The records of a stage without an end; one pass over a source follows the other.

    Args:
        sources: at least one.
        wanted: which of their records.
        seed: of the order.
        buffer: records of a source among which the next is drawn; a pass is a whole permutation
            where it holds all of them.
        rows: that the run takes.
        rows_per_step: that it takes at a time.
    """

    def __init__(
        self,
        sources: Sequence[StreamedSource],
        wanted: Wanted,
        *,
        seed: int,
        buffer: int,
        rows: int,
        rows_per_step: int,
    ) -> None:
        self._sources, self._wanted = tuple(sources), wanted
        self._seed, self._buffer = seed, buffer
        self.rows, self.rows_per_step = rows, rows_per_step

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[Record]:
        streams = [self._passes(number) for number in range(len(self._sources))]
        total = sum(source.weight for source in self._sources)
        credits = [0.0] * len(streams)
        while True:
            # The source that is furthest behind its share is next.
            for number, source in enumerate(self._sources):
                credits[number] += source.weight
            chosen = max(range(len(streams)), key=credits.__getitem__)
            credits[chosen] -= total
            yield next(streams[chosen])

    def _passes(self, number: int) -> Iterator[Record]:
        source, done = self._sources[number], 0
        while True:
            counts = SourceCounts(source.name)
            draw = random.Random(f"{self._seed}/{number}/{done}")
            found = 0
            for record in shuffled(self._of_one_pass(source, counts), self._buffer, draw):
                yield record
                found += 1
            if not found:
                raise ConfigError(
                    f"data source {source.name}: none of its {counts.read} rows is there for this "
                    "stage to train on; leave it out, or see --data-split"
                )
            done += 1

    def _of_one_pass(self, source: StreamedSource, counts: SourceCounts) -> Iterator[Record]:
        records = iter(source.open(counts))
        while block := list(islice(records, BLOCK_ROWS)):
            table = ListedRecords(block)
            yield from (block[place] for place in np.flatnonzero(self._wanted(table)))


def shuffled(records: Iterable[Record], buffer: int, draw: random.Random) -> Iterator[Record]:
    """Yields records in an order that is random within a window.

    Args:
        records: to shuffle.
        buffer: size of the window.
        draw: decides.
    """
    waiting: list[Record] = []
    for record in records:
        waiting.append(record)
        if len(waiting) > buffer:
            place = draw.randrange(len(waiting))
            waiting[place], waiting[-1] = waiting[-1], waiting[place]
            yield waiting.pop()
    draw.shuffle(waiting)
    yield from waiting
