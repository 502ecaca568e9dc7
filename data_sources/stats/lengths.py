"""Lengths of many texts as running counts: percentiles and histograms without keeping rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
BINS = 20


@dataclass(slots=True)
class Lengths:
    """How often each length occurs; memory grows with the number of different lengths."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, length: int) -> None:
        """Counts one text."""
        self.counts[length] += 1

    @property
    def total(self) -> int:
        """Number of texts."""
        return self.counts.total()

    @property
    def mean(self) -> float:
        """Mean length; 0 without texts."""
        return sum(length * n for length, n in self.counts.items()) / max(self.total, 1)

    def percentile(self, percent: float) -> int:
        """Returns the shortest length that at least `percent` % of the texts do not exceed.

        This is the nearest-rank percentile: always a length that occurs.
        """
        assert self.counts, "no texts"
        rank = max(math.ceil(percent / 100 * self.total), 1)
        seen = 0
        for length in sorted(self.counts):
            seen += self.counts[length]
            if seen >= rank:
                break
        return length

    def above(self, limit: int) -> int:
        """Returns how many texts are longer than `limit`."""
        return sum(n for length, n in self.counts.items() if length > limit)

    def histogram(self, bins: int = BINS) -> list[tuple[int, int, int]]:
        """Returns (first length, last length, texts) of bins of one width.

        The last bin takes all that is longer than the 99th percentile, so that one giant does
        not leave the rest in a single bin.
        """
        if not self.counts:
            return []
        lowest, largest = min(self.counts), max(self.counts)
        usual = self.percentile(99)
        width = max(math.ceil((usual - lowest + 1) / bins), 1)
        edges = list(range(lowest, usual + 1, width))
        found: Counter[int] = Counter()
        for length, number in self.counts.items():
            found[min((length - lowest) // width, len(edges) - 1)] += number
        ends = [edge - 1 for edge in edges[1:]] + [largest]
        return [(edges[i], ends[i], found[i]) for i in range(len(edges))]

    def as_json(self) -> dict[str, Any]:
        """Returns count, mean, smallest, percentiles, largest and histogram."""
        if not self.counts:
            return {"count": 0}
        return {
            "count": self.total,
            "mean": round(self.mean, 2),
            "min": min(self.counts),
            **{f"p{percent}": self.percentile(percent) for percent in PERCENTILES},
            "max": max(self.counts),
            "histogram": [
                {"from": low, "to": high, "count": number} for low, high, number in self.histogram()
            ],
        }
