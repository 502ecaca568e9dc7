"""What a reader yields: a row as its file has it, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

NOT_UTF8 = "not valid UTF-8"


class DataFile(Protocol):
    """A file here or elsewhere, as messages show it."""

    @property
    def name(self) -> str:
        """The file's own name, without the directories."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as its file has it; `where` names file and line (or row) for messages."""

    where: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no row: cannot be parsed, or is not an object with columns."""

    where: str
    reason: str
    detail: str


Rows = Iterator[RawRow | BadRow]
