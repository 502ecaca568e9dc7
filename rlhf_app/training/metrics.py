"""The metrics file: one JSON object a line, flushed at once, so that others can follow it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal


class MetricsWriter:
    """Appends records to a `metrics.jsonl` file.

    Args:
        path: the file; its directory is created and older records are dropped.
        enabled: False on every rank but the main one: nothing is written.
    """

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self._file = None
        if enabled:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")

    def write(
        self,
        *,
        kind: Literal["train", "eval"],
        step: int,
        total_steps: int,
        **numbers: float | None,
    ) -> None:
        """Writes one record.

        Args:
            kind: train, or eval for held-out data.
            step: optimizer steps (PPO: updates) done.
            total_steps: how many there will be.
            **numbers: the metrics. Non-finite ones become null, as JSON has no NaN.
        """
        if self._file is None:
            return
        record = {"step": step, "total_steps": total_steps, "time": time.time(), "kind": kind}
        self._file.write(json.dumps(record | {k: _finite(v) for k, v in numbers.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _finite(value: float | None) -> float | None:
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    return value
