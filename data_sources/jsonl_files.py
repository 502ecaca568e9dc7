"""Writing JSONL files that are either whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_app.errors import ConfigError


def check_output_file(path: Path, flag: str) -> None:
    """Refuses a path that cannot be written, before hours are spent on its content.

    Args:
        path: the file to be; its directory is created.
        flag: what named it, for messages.

    Raises:
        ConfigError: not .jsonl, a directory, or not writable.
    """
    if path.suffix != ".jsonl":
        raise ConfigError(f"{flag} {path}: the file is JSONL; give it a name that ends in .jsonl")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a directory; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: cannot be written: no permission in {path.parent}")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows beside the target, one JSON object a line, and renames the file into place.

    Raises:
        OSError: the disk is full or the file cannot be written; the target is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
