"""Whether the longer answer tends to be the chosen one: what a reward model may learn instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class LengthBias:
    """Lengths of chosen against rejected answers, in tokens or characters.

    Singhal et al. 2023, "A Long Way to Go" (arXiv:2310.03716): much of what RLHF gains can be
    reached by length alone.

    Attributes:
        longer, shorter, equal: pairs whose chosen answer is the longer one, the shorter one, or
            of the same length.
        chosen_sum, rejected_sum: lengths in all.
    """

    longer: int = 0
    shorter: int = 0
    equal: int = 0
    chosen_sum: int = 0
    rejected_sum: int = 0

    def add(self, chosen: int, rejected: int) -> None:
        """Counts one pair."""
        self.longer += chosen > rejected
        self.shorter += chosen < rejected
        self.equal += chosen == rejected
        self.chosen_sum += chosen
        self.rejected_sum += rejected

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return self.longer + self.shorter + self.equal

    @property
    def longer_share(self) -> float | None:
        """Share of pairs of different lengths whose longer answer is chosen; 0.5 is no bias."""
        different = self.longer + self.shorter
        return self.longer / different if different else None

    def as_json(self) -> dict[str, Any]:
        """Returns the counts, the share and the mean lengths."""
        pairs = max(self.pairs, 1)
        return {
            "pairs": self.pairs,
            "longer_chosen": self.longer,
            "shorter_chosen": self.shorter,
            "equal_length": self.equal,
            "longer_share": self.longer_share,
            "mean_chosen": round(self.chosen_sum / pairs, 2),
            "mean_rejected": round(self.rejected_sum / pairs, 2),
        }
