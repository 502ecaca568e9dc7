"""Rows of several tables in an order: a few numbers each, whose records are looked up when needed.

Legend: N rows of a selection.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from data_sources.record_table import RecordTable
from data_sources.records import Record


class Selected(Sequence[Record]):
    """Rows of tables, in an order, in any number of repeats; 10 bytes each.

    Args:
        tables: where the records are.
        prompts_only: of each table, whether its records come without their answers.
        table_N: uint16, the place in `tables` of each row.
        row_N: int64, its place in that table.
    """

    def __init__(
        self,
        tables: Sequence[RecordTable],
        prompts_only: Sequence[bool],
        table_N: NDArray[np.uint16],
        row_N: NDArray[np.int64],
    ) -> None:
        self.tables, self.prompts_only = tuple(tables), tuple(prompts_only)
        self.table_N, self.row_N = table_N, row_N

    @classmethod
    def joined(
        cls,
        tables: Sequence[RecordTable],
        prompts_only: Sequence[bool],
        rows: Sequence[NDArray[np.int64]],
    ) -> Selected:
        """Returns some rows of each table, table after table."""
        numbers = np.arange(len(tables), dtype=np.uint16)
        return cls(
            tables,
            prompts_only,
            np.repeat(numbers, [len(places) for places in rows]),
            np.concatenate([np.empty(0, dtype=np.int64), *rows]),
        )

    def take(self, places: NDArray[np.int64]) -> Selected:
        """Returns the rows at these places, in their order."""
        return Selected(self.tables, self.prompts_only, self.table_N[places], self.row_N[places])

    @property
    def uids_N(self) -> NDArray[np.uint64]:
        """Of each row its uid as a number (uint64)."""
        return self._gathered("uids_N", np.uint64)

    @property
    def keys_N(self) -> NDArray[np.uint64]:
        """Of each row its `prompt_key` as a number (uint64)."""
        return self._gathered("keys_N", np.uint64)

    @property
    def has_answer_N(self) -> NDArray[np.bool_]:
        """Whether SFT can imitate the row."""
        return self._gathered("has_answer_N", np.bool_) & ~self._prompts_only_N

    @property
    def is_pair_N(self) -> NDArray[np.bool_]:
        """Whether the row can train a reward model."""
        return self._gathered("is_pair_N", np.bool_) & ~self._prompts_only_N

    @property
    def fingerprint(self) -> str:
        """Names the records and their order; empty where a table is not known by name."""
        names = [table.fingerprint for table in self.tables]
        if not all(names):
            return ""
        found = hashlib.blake2b(json.dumps([names, self.prompts_only]).encode(), digest_size=16)
        for numbers_N in (self.table_N, self.row_N):
            found.update(np.ascontiguousarray(numbers_N).data)
        return found.hexdigest()

    def __len__(self) -> int:
        return len(self.row_N)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self._get(place) for place in range(*index.indices(len(self)))]
        return self._get(range(len(self))[index])

    def __iter__(self) -> Iterator[Record]:
        return (self._get(place) for place in range(len(self)))

    def _get(self, place: int) -> Record:
        table = int(self.table_N[place])
        record = self.tables[table][int(self.row_N[place])]
        return _prompt_of(record) if self.prompts_only[table] else record

    @property
    def _prompts_only_N(self) -> NDArray[np.bool_]:
        return np.array([*self.prompts_only, False], dtype=bool)[self.table_N]

    def _gathered(
        self, name: Literal["uids_N", "keys_N", "has_answer_N", "is_pair_N"], dtype: type[Any]
    ) -> NDArray[Any]:
        found_N = np.empty(len(self), dtype=dtype)
        for number, table in enumerate(self.tables):
            places = np.flatnonzero(self.table_N == number)
            found_N[places] = getattr(table, name)[self.row_N[places]]
        return found_N


def _prompt_of(record: Record) -> Record:
    """The record without its answers; it keeps its uid, and with it its place in the order."""
    ids = record.ids and replace(record.ids, response=(), chosen=(), rejected=())
    return replace(record, response=None, chosen=None, rejected=None, margin=None, ids=ids)
