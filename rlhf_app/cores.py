"""How much of the machine belongs to this process."""

from __future__ import annotations

import os


def own_cores() -> int:
    """Cores of this machine that are left for each of its ranks, at least 1."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // max(ranks, 1))
