"""The encoded examples of a stage, in the order of its records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, overload

from data_sources.encoder import RowLost
from data_sources.encodings import E, Encoding
from data_sources.records import Record


class Examples(Sequence[E], ABC, Generic[E]):
    """Examples in the order of the records that they come from.

    Attributes:
        lengths: tokens that each costs in a batch (`Encoding.length`).
        reasons: why rows were left out or cut, counted as often as the rows come.
        highest_id: of any token.
    """

    lengths: Sequence[int]
    reasons: Counter[str]
    highest_id: int
    #: Whether they are taken from the first to the last; else a pass shuffles them.
    in_order: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> E: ...
    @overload
    def __getitem__(self, index: slice) -> list[E]: ...
    def __getitem__(self, index: int | slice) -> E | list[E]:
        if isinstance(index, slice):
            return [self._get(place) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._get(index % len(self))

    def __iter__(self) -> Iterator[E]:
        return (self._get(place) for place in range(len(self)))

    @abstractmethod
    def _get(self, place: int) -> E: ...

    @abstractmethod
    def targets(self, place: int) -> int:
        """Tokens of an example that carry loss, where the loss is one of tokens."""

    @abstractmethod
    def ids(self, place: int) -> list[int]:
        """Token ids of an example that is one row."""

    @property
    def head(self) -> int:
        """How many, from the first, can be looked at before training."""
        return len(self)

    def token_rows(self) -> TokenRows:
        """The token ids of these examples, none of which is read before it is asked for."""
        return TokenRows(self)


class TokenRows(Sequence[list[int]]):
    """Token ids of the examples that can be looked at before training.

    Attributes:
        lengths: of each.
    """

    def __init__(self, examples: Examples[Any]) -> None:
        self._examples = examples
        self.lengths = examples.lengths[: examples.head]

    def __len__(self) -> int:
        return self._examples.head

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self._examples.ids(place) for place in range(*index.indices(len(self)))]
        return self._examples.ids(range(len(self))[index])


class ListedExamples(Examples[E]):
    """Examples in memory.

    Args:
        examples: all of them.
        encoding: that made them.
        reasons: why rows were left out or cut.
    """

    def __init__(
        self, examples: list[E], encoding: Encoding[E], reasons: Counter[str] | None = None
    ) -> None:
        self._examples, self._encoding = examples, encoding
        self.reasons = Counter() if reasons is None else reasons
        self.lengths = [encoding.length(example) for example in self._examples]
        self._targets = [encoding.targets(example) for example in self._examples]
        rows = (row for example in self._examples for row in encoding.rows(example))
        self.highest_id = max((max(row, default=0) for row in rows), default=0)

    @classmethod
    def of(cls, records: Iterable[Record], encoding: Encoding[E]) -> ListedExamples[E]:
        """Encodes records, in any number of repeats."""
        examples: list[E] = []
        reasons: Counter[str] = Counter()
        for record in records:
            try:
                examples += encoding.examples(record, reasons)
            except RowLost as lost:
                reasons[lost.reason] += 1
        return cls(examples, encoding, reasons)

    def _get(self, place: int) -> E:
        return self._examples[place]

    def targets(self, place: int) -> int:
        """See `Examples`."""
        return self._targets[place]

    def ids(self, place: int) -> list[int]:
        """See `Examples`."""
        (row,) = self._encoding.rows(self._examples[place])
        return list(row)
