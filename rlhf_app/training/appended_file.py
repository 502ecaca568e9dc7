"""A file of lines that grows, and continues after an interruption without gaps or doubles."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)


class AppendedFile:
    """Appends lines, flushed at once, so that others can follow it.

    Args:
        path: its directory is created at the first line, and older lines are dropped unless
            `load_state_dict` says how much of them stays.
        enabled: False on every rank but the main one: nothing is written.
    """

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self._path = path
        self._enabled = enabled
        self._file: TextIO | None = None

    def write_lines(self, lines: Iterable[str]) -> None:
        """Appends lines, each without its end."""
        if not self._enabled:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()

    def state_dict(self) -> dict[str, int]:
        """How long the file is."""
        return {"bytes": self._file.tell() if self._file is not None else 0}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Drops what was written after `state_dict` was called, and goes on there.

        The file is replaced, not cut: whoever follows it sees that it is another one.
        """
        if not self._enabled:
            return
        kept = self._path.read_bytes()[: state["bytes"]] if self._path.is_file() else b""
        if len(kept) < state["bytes"]:
            log.warning("%s: lines written before the interruption are missing", self._path)
            kept = kept[: kept.rfind(b"\n") + 1]
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.new")
        temporary.write_bytes(kept)
        temporary.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
