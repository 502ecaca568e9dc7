"""What became of every row: nothing is left out without a reason and a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import Logger

from data_sources.fields import listed

SAMPLES_PER_REASON = 3
# Left out on purpose, whatever their number: no faults of the data.
OTHER_SPLIT = "row is of the other split"
FOR_TRAINING = "prompt is in the nine tenths to train on"
LEFT_OUT = "left out by the normaliser"
SET_ASIDE = frozenset({OTHER_SPLIT, FOR_TRAINING, LEFT_OUT})
OVER_CAP = "beyond the source's max_rows"


def log_dropped(log: Logger, dropped: Mapping[str, int]) -> None:
    """Logs how many rows were left out or cut, by reason, the most frequent first."""
    ordered = sorted(dropped.items(), key=lambda item: -item[1])
    shown = "; ".join(f"{number} {reason}" for reason, number in ordered if number)
    log.info("rows left out or cut: %s", shown or "none")


@dataclass(slots=True)
class SourceCounts:
    """Rows of one source.

    Attributes:
        path: the source as the user named it.
        shape: name of the recognised shape.
        read: rows found, unreadable ones included.
        unusable: reason -> rows that gave no record.
        records: records made. At least `usable` (a reply tree gives several).
        notes: remark -> rows that were used, but not all of what they hold; records beyond a cap.
        samples: reason -> where the first such rows are, and what is wrong with them.
        unused: columns that play no part in the shape.
        remarks: what looks wrong with the source as a whole.
    """

    path: str
    shape: str = ""
    read: int = 0
    unusable: Counter[str] = field(default_factory=Counter)
    records: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[str]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def bad(self) -> Counter[str]:
        """Reason -> unusable rows that are faults of the data."""
        return Counter({k: n for k, n in self.unusable.items() if k not in SET_ASIDE})

    @property
    def set_aside(self) -> Counter[str]:
        """Reason -> rows that were left out on purpose."""
        return Counter({k: n for k, n in self.unusable.items() if k in SET_ASIDE})

    def has_too_many_bad(self, limit: float) -> bool:
        """Returns whether a run refuses the source: all rows are bad, or more than this share."""
        bad = self.bad.total()
        return bad > 0 and (bad >= self.read or bad > limit * self.read)

    @property
    def looks(self) -> list[str]:
        """What a person should know of the source as a whole."""
        unused = [f"columns not used: {listed(self.unused)}"] if self.unused else []
        return [*self.remarks, *unused]

    @property
    def usable(self) -> int:
        """Rows that gave at least one record."""
        return self.read - self.unusable.total()

    def reject(self, reason: str, sample: str, rows: int = 1) -> None:
        """Counts unusable rows, and keeps the first few to show."""
        self.unusable[reason] += rows
        kept = self.samples.setdefault(reason, [])
        if len(kept) < SAMPLES_PER_REASON:
            kept.append(sample)

    def add(self, later: SourceCounts) -> None:
        """Counts further rows of the same source."""
        self.read += later.read
        self.records += later.records
        self.unusable.update(later.unusable)
        self.notes.update(later.notes)
        for reason, samples in later.samples.items():
            kept = self.samples.setdefault(reason, [])
            kept += samples[: SAMPLES_PER_REASON - len(kept)]


@dataclass(slots=True)
class StageCounts:
    """Records of one stage; `candidates + repeated == train + evaluation + dropped`.

    Attributes:
        candidates: records that the split, the stage's own data or data.eval gave the stage.
        repeated: further copies that a weight above 1 asked for.
        train, evaluation: records in use.
        dropped: reason -> records left out.
    """

    candidates: int = 0
    repeated: int = 0
    train: int = 0
    evaluation: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class DataCounts:
    """Counts of all sources that were read, and of the stages they were split over.

    Attributes:
        sources: training sources, then evaluation sources.
        stages: stage name -> its counts; only the loaded stage has `dropped` and the rest
            filled in, the others show `candidates`, their share of a common split.
    """

    sources: list[SourceCounts] = field(default_factory=list)
    stages: dict[str, StageCounts] = field(default_factory=dict)

    def dropped(self, stage: str) -> dict[str, int]:
        """Returns reason -> number of rows or records that the stage lost, sources included."""
        total: Counter[str] = Counter()
        for source in self.sources:
            total.update(source.unusable)
            total[OVER_CAP] += source.notes[OVER_CAP]
        total.update(self.stages[stage].dropped)
        return dict((+total).most_common())
