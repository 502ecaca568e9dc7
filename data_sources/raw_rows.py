"""What a reader yields: a row as its file has it, or the reason why there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_app.errors import ConfigError

NOT_UTF8 = "not valid UTF-8"


class DataFile(Protocol):
    """A file here or elsewhere, as messages show it."""

    @property
    def name(self) -> str:
        """The file's own name, without the directories."""


def is_utf16(file: DataFile, form: str = "UTF-16") -> ConfigError:
    """Returns the error of a file in another encoding.

    Args:
        file: which.
        form: UTF-16LE or UTF-16BE where it has no mark that tells.
    """
    return ConfigError(f"{file} is {form}; convert it: iconv -f {form} -t UTF-8")


def refuse_twice(file: DataFile, names: Sequence[str]) -> None:
    """Refuses columns of one name, of which a row could keep only the last.

    Raises:
        ConfigError: names the first of them.
    """
    twice = next((name for name, times in Counter(names).items() if name and times > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{file}: column {twice!r} is there {names.count(twice)} times; rename all but one"
        )


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
