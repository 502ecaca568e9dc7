"""The different records of a selection: what they are, each once, whatever their order.

Legend: N records of a selection, R different ones among them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from data_sources.record_table import hexadecimal
from data_sources.records import Record
from data_sources.selection import Selected

Found = tuple[bytes, Sequence[Record], NDArray[np.int64]]


def each_once(records: Sequence[Record]) -> Found:
    """Returns what the different records are.

    Tables whose content is known by name tell rows apart by their numbers, and no record is read;
    other records are told apart by their content.

    Args:
        records: in any order and number of repeats.

    Returns:
        (what they are, the same for every order; the different ones; place of each record in
        those).
    """
    if isinstance(records, Selected) and all(table.fingerprint for table in records.tables):
        return _by_number(records)
    return _by_content(records)


def uid_of(records: Sequence[Record], place: int) -> str:
    """Returns the uid of one record, without reading it where a table knows it."""
    if not isinstance(records, Selected):
        return records[place].uid
    table = records.tables[records.table_N[place]]
    return hexadecimal(int(table.uids_N[records.row_N[place]]))


def _by_number(records: Selected) -> Found:
    places_N = np.empty(len(records), dtype=np.int64)
    rows: list[NDArray[np.int64]] = []
    found = hashlib.blake2b(digest_size=16)
    before = 0
    for number, table in enumerate(records.tables):
        here = np.flatnonzero(records.table_N == number)
        used = np.zeros(len(table), dtype=bool)
        used[records.row_N[here]] = True
        places_N[here] = before + (np.cumsum(used) - 1)[records.row_N[here]]
        rows.append(np.flatnonzero(used))
        before += len(rows[-1])
        name = json.dumps([table.fingerprint, records.prompts_only[number], len(rows[-1])])
        found.update(name.encode("ascii") + rows[-1].tobytes())
    once = Selected.joined(records.tables, records.prompts_only, rows)
    return found.digest(), once, places_N


def _by_content(records: Sequence[Record]) -> Found:
    digests_N = _digests(records)
    halves_N = digests_N.view([("high", ">u8"), ("low", ">u8")])
    order_N = np.lexsort((halves_N["low"], halves_N["high"]))
    sorted_N = digests_N[order_N]
    new_N = np.ones(len(sorted_N), dtype=bool)
    new_N[1:] = sorted_N[1:] != sorted_N[:-1]
    places_N = np.empty(len(order_N), dtype=np.int64)
    places_N[order_N] = np.cumsum(new_N) - 1
    return sorted_N[new_N].tobytes(), _Picked(records, order_N[new_N]), places_N


def _digests(records: Iterable[Record]) -> NDArray[np.void]:
    return np.frombuffer(b"".join(map(_digest, records)), dtype="V16")


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
            return [self._records[int(place)] for place in self._order_R[index]]
        return self._records[int(self._order_R[index])]
