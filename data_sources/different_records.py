"""The different records of a selection: what they are, each once, whatever their order.

Legend: N records of a selection, R different ones among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from data_sources.records import Record

Found = tuple[bytes, Sequence[Record], NDArray[np.int64]]


def each_once(records: Sequence[Record]) -> Found:
    """Returns what the different records are.

    They are told apart by their content.

    Args:
        records: in any order and number of repeats.

    Returns:
        (what they are, the same for every order; the different ones; place of each record in
        those).
    """
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
