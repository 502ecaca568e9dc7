"""Which rows of a blend are seen, how often, and in which order.

Everything is decided by hashes of the rows' content and the seed: the same on every rank, in every
process and whatever the order of files, and no row's place depends on the rows around it. What
depends on the other sources is how often a source's rows come on average, and only with a
temperature or an exhaustion policy of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_sources.identity import unit_hashes

Exhaustion = Literal["weights", "first_exhausted", "all_exhausted", "once"]

#: More repetitions of a row than anyone means to ask for.
MOST_REPEATS = 1000


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


def most_rows(uids_N: NDArray[np.uint64], most: int | None) -> NDArray[np.int64]:
    """Returns the places of at most `most` rows, drawn by their content, in the given order.

    The file's order does not matter, nor does the seed: the first ones of a sorted file would be
    a skewed sample.

    Args:
        uids_N: uint64, the rows' uids as numbers.
        most: None keeps all.
    """
    if most is None or len(uids_N) <= most:
        return np.arange(len(uids_N))
    ranked = np.argsort(unit_hashes(uids_N, "cap"), kind="stable")
    return np.sort(ranked[:most])


def copies(uids_N: NDArray[np.uint64], rate: float, seed: int) -> NDArray[np.int64]:
    """Returns how often each row is taken: rate 2.3 is 2, and 3 for 30 % of the rows.

    The rows are drawn by a hash of their content and the seed: the same on every rank, and
    unchanged by other rows.
    """
    whole = math.floor(rate)
    taken_N = np.full(len(uids_N), whole)
    if rest := rate - whole:
        taken_N += unit_hashes(uids_N, "blend", str(seed)) < rest
    return taken_N


def in_order(
    uids_N: NDArray[np.uint64], copies_N: NDArray[np.int64], seed: int
) -> NDArray[np.int64]:
    """Returns places of rows in an order that mixes the sources and depends on the seed alone.

    Args:
        uids_N: uint64, the rows' uids as numbers.
        copies_N: how often each row comes.
        seed: run seed.
    """
    place, copy = np.flatnonzero(copies_N), 0
    places: list[NDArray[np.int64]] = []
    ranks: list[NDArray[np.float64]] = []
    while len(place):
        places.append(place)
        ranks.append(unit_hashes(uids_N[place], "order", str(seed), after=[str(copy)]))
        copy += 1
        place = place[copies_N[place] > copy]
    if not places:
        return np.empty(0, dtype=np.int64)
    # First copies stand before second ones here, which settles equal ranks.
    return np.concatenate(places)[np.argsort(np.concatenate(ranks), kind="stable")]
