"""Tells a local model directory from a Hub id without touching the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_local_path(name: str) -> bool:
    """Whether `name` must be a directory here rather than a Hub id.

    True for what exists, and for what could not be a Hub id: absolute and relative paths
    (`/m`, `./m`, `../m`, `~/m`, `m/`), and more than one slash.
    """
    if name.startswith(("/", ".", "~")) or name.endswith("/") or os.sep * 2 in name:
        return True
    return Path(name).exists() or _HUB_ID.fullmatch(name) is None
