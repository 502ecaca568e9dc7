"""Which rows of a blend are seen, how often, and in which order.

Everything is decided by hashes of the rows' content and the seed: the same on every rank, in every
process and whatever the order of files, and no row's place depends on the rows around it. What
depends on the other sources is how often a source's rows come on average, and only with a
temperature or an exhaustion policy of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from data_sources.identity import unit_hash
from data_sources.records import Record
from rlhf_app.config.schema import StageName

Exhaustion = Literal["weights", "first_exhausted", "all_exhausted", "once"]

#: More repetitions of a row than anyone means to ask for.
MOST_REPEATS = 1000


@dataclass(frozen=True, slots=True)
class Weighted:
    """A record with its prompt key and what its source says of it.

    Attributes:
        record, key: the record, `prompt_key` of its prompt.
        weight: how often it is taken on average.
        source: place of its source among those that were read.
        stages: the only stages that it may go to; empty: any.
    """

    record: Record
    key: str
    weight: float
    source: int = 0
    stages: tuple[StageName, ...] = ()


def take_rates(
    weights: Sequence[float], rows: Sequence[int], temperature: float, exhaustion: Exhaustion
) -> list[float]:
    """Returns how often the rows of each source are taken on average in one pass.

    Shares of the sources are proportional to weight * rows ** (1 / temperature). (Temperatures of
    multilingual mixtures: Arivazhagan et al. 2019, arXiv:1907.05019.) The policy decides how long
    a pass is: as many rows as the weights alone ask for; until the first source is used up,
    without repeating any; until every row has been seen, others repeated; or each row once,
    whatever the shares.

    Args:
        weights: of each source.
        rows: that each source has; those of an empty one are never taken.
        temperature: 1 leaves the shares to weights and sizes, infinity to the weights.
        exhaustion: the policy.
    """
    if exhaustion == "once":
        return [1.0] * len(rows)
    if exhaustion == "weights" and temperature == 1:
        return list(weights)
    full = [i for i, number in enumerate(rows) if number]
    rates = [0.0] * len(rows)
    for i in full:
        rates[i] = weights[i] * rows[i] ** (1 / temperature - 1)
    if exhaustion == "weights":
        asked = sum(weights[i] * rows[i] for i in full)
        unit = sum(rates[i] * rows[i] for i in full) / asked if full else 1.0
    else:
        pick = max if exhaustion == "first_exhausted" else min
        unit = pick((rates[i] for i in full), default=1.0)
    # A rate of 1.9999999999 is meant to be 2.
    return [round(rate / unit, 9) for rate in rates]


def most_rows(records: Sequence[Record], most: int | None) -> list[Record]:
    """Returns at most `most` records, drawn by their content, in the given order.

    The file's order does not matter, nor does the seed: the first ones of a sorted file would be
    a skewed sample.
    """
    if most is None or len(records) <= most:
        return list(records)
    ranked = sorted(range(len(records)), key=lambda i: (unit_hash("cap", records[i].uid), i))
    return [records[i] for i in sorted(ranked[:most])]


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
