"""The metrics file: one JSON object a line, flushed at once, so that others can follow it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rlhf_app.training.appended_file import AppendedFile


class MetricsWriter:
    """Appends records to a `metrics.jsonl` file.

    Args:
        path: the file; its directory is created, and older records are dropped unless
            `load_state_dict` goes on from them.
        enabled: False on every rank but the main one: nothing is written.
    """

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self._file = AppendedFile(path, enabled)

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
        record = {"step": step, "total_steps": total_steps, "time": time.time(), "kind": kind}
        self._file.write_lines([json.dumps(record | {k: _finite(v) for k, v in numbers.items()})])

    def state_dict(self) -> dict[str, int]:
        """How much of the file is written."""
        return self._file.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on there; later records are dropped."""
        self._file.load_state_dict(state)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _finite(value: float | None) -> float | None:
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    return value
