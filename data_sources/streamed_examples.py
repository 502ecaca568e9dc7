"""Examples of a stream: encoded as they are asked for, from the first to the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import overload

from data_sources.encoded import Examples
from data_sources.encoder import RowLost
from data_sources.encodings import E, Encoding
from data_sources.record_stream import RecordStream
from rlhf_app.errors import ConfigError

#: Examples that are encoded before training: whether any fit is known then.
HEAD = 1_000
#: No stream goes on that long without a row that fits.
MOST_LOST = 20_000


class StreamedExamples(Examples[E]):
    """The examples that a run will take; those of the last steps can be asked for.

    Places go up: who asks for one makes the stream read on to it, and what lies two steps behind
    it is gone. `reasons` counts the rows that have been read so far.

    Args:
        records: the stream.
        encoding: of the stage.
    """

    in_order = True

    def __init__(self, records: RecordStream, encoding: Encoding[E]) -> None:
        self._stream, self._encoding = records, encoding
        self._keep = max(HEAD, 2 * records.rows_per_step)
        self.reasons = Counter()
        self._made = self._encoded()
        self._window: dict[int, E] = {}
        self._next = 0
        self.lengths = _Lengths(self)
        self._head = min(HEAD, len(records))
        self._first = self._get(0)
        self._get(self._head - 1)
        rows = (row for example in self._window.values() for row in encoding.rows(example))
        self.highest_id = max(max(row, default=0) for row in rows)

    def __len__(self) -> int:
        return len(self._stream)

    @property
    def head(self) -> int:
        """How many are read from the start."""
        return self._head

    def targets(self, place: int) -> int:
        """See `Examples`."""
        return self._encoding.targets(self._get(place))

    def ids(self, place: int) -> list[int]:
        """See `Examples`."""
        (row,) = self._encoding.rows(self._get(place))
        return list(row)

    def length(self, place: int) -> int:
        """Tokens that an example costs in a batch."""
        return self._encoding.length(self._get(place))

    def _get(self, place: int) -> E:
        while self._next <= place:
            self._window[self._next] = next(self._made)
            self._window.pop(self._next - self._keep, None)
            self._next += 1
        # The first one fills up batches, whatever the step.
        return self._first if place == 0 and self._next > 1 else self._window[place]

    def _encoded(self) -> Iterator[E]:
        lost_in_a_row = 0
        for record in self._stream:
            try:
                yield from self._encoding.examples(record, self.reasons)
                lost_in_a_row = 0
            except RowLost as lost:
                self.reasons[lost.reason] += 1
                lost_in_a_row += 1
                if lost_in_a_row == MOST_LOST:
                    raise ConfigError(
                        f"data: none of {MOST_LOST} rows in a row can be used, the last one for "
                        f"this reason: {lost.reason}; see the length limits and data.truncation"
                    ) from None


class _Lengths(Sequence[int]):
    def __init__(self, examples: StreamedExamples[E]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            places = range(*index.indices(len(self)))
            return [self._examples.length(place) for place in places]
        return self._examples.length(range(len(self))[index])
