"""What a stage has measured so far, and which of its weights the artifact holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Generic, TypeVar

Report = TypeVar("Report")


class Progress(Generic[Report]):
    """The evaluations that a stage's result is about; a checkpoint keeps them.

    Args:
        read: builds an evaluation from its fields, as `dataclasses.asdict` gives them.

    Attributes:
        before: the evaluation before the first step.
        kept: that of the weights in the artifact.
        kept_step: steps after which they were evaluated; 0 while there is no artifact.
        evaluated: steps after which the last evaluation was; -1 before the first.
        facts: plain values for the stage's result.
    """

    def __init__(self, read: Callable[[Mapping[str, Any]], Report]) -> None:
        self._read = read
        self.before: Report | None = None
        self.kept: Report | None = None
        self.kept_step = 0
        self.evaluated = -1
        self.facts: dict[str, Any] = {}

    def note(self, step: int, report: Report, *, chosen: bool) -> None:
        """Take in an evaluation.

        Args:
            step: steps done.
            report: what was found; the one before the first step is the comparison.
            chosen: whether its weights become the artifact.
        """
        self.evaluated = step
        if self.before is None:
            self.before = self.kept = report
        if chosen:
            self.kept, self.kept_step = report, step

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "before": _fields(self.before),
            "kept": _fields(self.kept),
            "kept_step": self.kept_step,
            "evaluated": self.evaluated,
            "facts": self.facts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.before = self._read(state["before"]) if state["before"] else None
        self.kept = self._read(state["kept"]) if state["kept"] else None
        self.kept_step, self.evaluated = state["kept_step"], state["evaluated"]
        self.facts = dict(state["facts"])


def _fields(report: Any) -> dict[str, Any] | None:
    return None if report is None else asdict(report)
