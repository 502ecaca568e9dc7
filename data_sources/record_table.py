"""The records of one source in the order of its rows, wherever they lie.

What decides where a record goes (split, held out, order) is a few numbers per row, in arrays; its
texts are looked up when they are needed.

Legend: N records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from data_sources.identity import content_uid, prompt_key
from data_sources.records import Record

#: What is kept in memory of every record: uid, prompt key, two flags.
ROW_BYTES = 8 + 8 + 1 + 1


class RecordTable(Sequence[Record], ABC):
    """Records, and what is known of each without reading it.

    Attributes:
        uids_N: uint64; a uid's 16 hexadecimal digits as a number.
        keys_N: uint64, the same of `prompt_key`.
        has_answer_N: bool, whether SFT can imitate the record.
        is_pair_N: bool, whether it can train a reward model.
    """

    uids_N: NDArray[np.uint64]
    keys_N: NDArray[np.uint64]
    has_answer_N: NDArray[np.bool_]
    is_pair_N: NDArray[np.bool_]

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Names the records: tables with the same one hold the same."""

    def __len__(self) -> int:
        return len(self.uids_N)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self._get(place) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._get(index % len(self))

    @abstractmethod
    def __iter__(self) -> Iterator[Record]: ...

    @abstractmethod
    def _get(self, place: int) -> Record: ...


class ListedRecords(RecordTable):
    """Records in memory.

    Args:
        records: those without a uid get the hash of their content.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = list(records)
        uids = [int(record.uid or content_uid(record), 16) for record in self._records]
        keys = [int(prompt_key(record.messages), 16) for record in self._records]
        self.uids_N = np.array(uids, dtype=np.uint64)
        self.keys_N = np.array(keys, dtype=np.uint64)
        self.has_answer_N = np.array([r.sft_target is not None for r in self._records], dtype=bool)
        self.is_pair_N = np.array([r.is_pair for r in self._records], dtype=bool)

    @property
    def fingerprint(self) -> str:
        """An empty text: records that are in memory are not looked up by name."""
        return ""

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def _get(self, place: int) -> Record:
        return self._records[place]


def hexadecimal(number: int) -> str:
    """Returns the text of a uid or key, of which tables keep the number."""
    return f"{number:016x}"
