"""Which evaluation's weights become a stage's artifact: the last one's, or the best one's."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger(__name__)

LOWER_IS_BETTER = frozenset({"loss"})


@dataclass(frozen=True)
class Kept:
    """The evaluation whose weights were saved.

    Attributes:
        step: optimizer steps (PPO: updates) done at that evaluation.
        metric: what it was chosen by.
        value: that metric's number; None where it has none that is finite.
    """

    step: int
    metric: str
    value: float | None


class BestWeights:
    """Decides after each evaluation whether its weights are to be saved.

    It sees numbers alone, the same on every rank, so that all ranks decide alike. The
    evaluation before the first step takes no part: an artifact holds trained weights.

    Args:
        metric: name of the number to choose by, or None: the last weights are the artifact.
        at_most: numbers that must not be larger in an evaluation whose weights are kept.
        setting: the stage's name, for messages.
    """

    def __init__(
        self, metric: str | None, *, at_most: Mapping[str, float] | None = None, setting: str = ""
    ) -> None:
        self._metric = metric
        self._at_most = dict(at_most or {})
        self._setting = setting
        self._kept: Kept | None = None

    @property
    def metric(self) -> str | None:
        """Name of the number to choose by, or None: the last weights are the artifact."""
        return self._metric

    @property
    def kept(self) -> Kept | None:
        """Whose weights are saved; None so far, or where the last are saved in any case."""
        return self._kept

    def offer(self, step: int, numbers: Mapping[str, float | None], *, last: bool) -> bool:
        """Whether to save the weights that this evaluation is about, in place of earlier ones.

        Equal values keep the earlier weights; a number that is missing or not finite never
        wins. The last evaluation wins where none before it was fit to, with a warning.

        Args:
            step: optimizer steps (PPO: updates) done.
            numbers: what the evaluation found.
            last: no other evaluation follows.
        """
        if self._metric is None:
            return last
        value = _finite(numbers.get(self._metric))
        if value is not None and self._within(numbers) and self._better(value):
            self._kept = Kept(step, self._metric, value)
            return True
        if last and self._kept is None:
            log.warning("%s: %s", self._setting, self._why_none())
            self._kept = Kept(step, self._metric, value)
            return True
        return False

    def result(self) -> dict[str, Any]:
        """For result.json: {"kept": {step, metric, value}}, or nothing without a metric."""
        return {} if self._kept is None else {"kept": asdict(self._kept)}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; plain numbers and strings."""
        return {"metric": self._metric, "kept": self._kept and asdict(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            ValueError: it was chosen by another metric.
        """
        if state["metric"] != self._metric:
            raise ValueError(f"kept by {state['metric']}, not by {self._metric}")
        self._kept = Kept(**state["kept"]) if state["kept"] else None

    def _within(self, numbers: Mapping[str, float | None]) -> bool:
        for name, most in self._at_most.items():
            value = _finite(numbers.get(name))
            if value is None or value > most:
                return False
        return True

    def _better(self, value: float) -> bool:
        if self._kept is None or self._kept.value is None:
            return True
        if self._metric in LOWER_IS_BETTER:
            return value < self._kept.value
        return value > self._kept.value

    def _why_none(self) -> str:
        limits = " and ".join(f"{name} <= {most:g}" for name, most in self._at_most.items())
        return (
            f"no evaluation had a finite {self._metric}{' and ' if limits else ''}{limits}: "
            "the last weights are kept"
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
