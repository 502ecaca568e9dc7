"""When this process began, so that a stage's time includes its imports."""

from __future__ import annotations

import psutil


def process_start() -> float:
    """Unix time at which the operating system created this process."""
    return float(psutil.Process().create_time())
