"""Where the time of a stage goes, from the moment its process was asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import psutil

#: When the controller started the command, in unix seconds: in the environment of its workers.
LAUNCHED = "RLHF_LAUNCHED"
#: How long a collective waits for the other ranks: in the environment of the workers, too.
TIMEOUT_MINUTES = "RLHF_TIMEOUT_MINUTES"
STARTUP = ("launch", "data", "model", "engine")


class StageClock:
    """Books a stage's time under the names of its parts, without gaps.

    It starts when the controller started the command, or by hand, when the operating system
    created this process. What is before the first `lap` belongs to `launch`: starting Python,
    imports, and joining the process group.
    """

    def __init__(self) -> None:
        launched = os.environ.get(LAUNCHED)
        self._began = float(launched) if launched else float(psutil.Process().create_time())
        self._since = self._began
        self._seconds: dict[str, float] = {}
        self._earlier = 0.0

    def lap(self, name: str) -> None:
        """Book the time since the last lap under `name`, added to what is there."""
        now = time.time()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def move(self, seconds: float, source: str, target: str) -> None:
        """Book some seconds of one part under another instead."""
        self._seconds[source] -= seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def state_dict(self) -> dict[str, Any]:
        """What is booked, for a checkpoint."""
        wall = self._earlier + self._since - self._began
        return {"wall_seconds": wall, "seconds": dict(self._seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add what was booked before an interruption."""
        self._earlier = state["wall_seconds"]
        for name, seconds in state["seconds"].items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def result(self) -> dict[str, object]:
        """What `result.json` says about time.

        Returns:
            `wall_seconds`, from the start to the last lap, interruptions not counted;
            `startup_seconds`, the part of it before there was anything to train; and `seconds`,
            each part's.
        """
        return {
            "wall_seconds": self._earlier + self._since - self._began,
            "startup_seconds": sum(self._seconds.get(name, 0.0) for name in STARTUP),
            "seconds": dict(self._seconds),
        }
