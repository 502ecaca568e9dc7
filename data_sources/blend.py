"""How often each row of a weighted blend is seen, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from data_sources.identity import unit_hash
from data_sources.records import Record


@dataclass(frozen=True, slots=True)
class Weighted:
    """A record with its prompt key and its source's weight."""

    record: Record
    key: str
    weight: float


def copies(item: Weighted, seed: int) -> int:
    """Returns how often a row is taken: weight 2.3 is 2, and 3 for 30 % of the rows.

    The rows are drawn by a hash of their content and the seed: the same on every rank, and
    unchanged by other rows.
    """
    whole = math.floor(item.weight)
    rest = item.weight - whole
    return whole + int(unit_hash("blend", str(seed), item.record.uid) < rest)


def in_order(items: Iterable[tuple[Record, int]], seed: int) -> list[Record]:
    """Returns the records in an order that mixes the sources and depends on the seed alone.

    Args:
        items: (record, copy number) pairs.
        seed: run seed.
    """
    ranked = sorted(
        items, key=lambda item: (unit_hash("order", str(seed), item[0].uid, str(item[1])), item[1])
    )
    return [record for record, _ in ranked]
