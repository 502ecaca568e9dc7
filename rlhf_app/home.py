"""Home directories in paths."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Returns a path with `~` and `~name` replaced; as it stands where there is no such home.

    A shell does the same. `Path.expanduser` fails instead: a name may begin so and be no user's.
    """
    return Path(os.path.expanduser(path))
