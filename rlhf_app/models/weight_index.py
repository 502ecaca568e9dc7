"""Names of files inside a model's directory, which whoever made the model has chosen."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_app.errors import ConfigError


def check_weight_index(directory: Path, where: str) -> None:
    """Refuses a list of weight files that points outside the model's directory.

    Args:
        directory: of the model.
        where: the setting and the path, for the error.

    Raises:
        ConfigError: names the list and the file.
    """
    for index in sorted(directory.glob("*.index.json")):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # transformers says what is wrong
        for name in sorted(filter(_is_outside, map(str, names))):
            raise ConfigError(
                f"{where}: {index.name} names {name}, which lies outside the model's directory: "
                "take the model from a place that you trust"
            )


def _is_outside(name: str) -> bool:
    path = Path(name)
    return path.is_absolute() or ".." in path.parts
