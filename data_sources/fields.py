"""Reading one value out of a raw row: text, numbers and lists of turns, or a counted reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from data_sources.records import Message, Role
from data_sources.transcripts import merge_turns

Row = Mapping[str, Any]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    # A call is something the assistant writes; its result is not.
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}


class RowError(ValueError):
    """A row that gives no record.

    Args:
        reason: short and general; rows are counted by it.
        detail: what is wrong with this very row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def encodable(text: str, column: str) -> str:
    """Returns the text, and refuses what marks damage.

    Half of a surrogate pair is taken by no tokenizer; a null byte ends the text for some, and is
    a sign of UTF-16 read as bytes.
    """
    if "\0" in text:
        raise RowError(f"{column} holds a null byte", f"character {text.index(chr(0)) + 1}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"{column} is not valid Unicode", f"character {error.start + 1}") from None
    return text


def text_of(row: Row, column: str) -> str:
    """Returns the row's text; numbers become text, lists and objects are refused."""
    value = row.get(column)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise RowError(f"{column} is missing")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RowError(f"{column} is not text", type(value).__name__)
    if isinstance(value, float) and math.isinf(value):
        raise RowError(f"{column} is not text", str(value))
    return encodable(str(value), column)


def answer_of(row: Row, column: str) -> str:
    """Returns an answer's text, and refuses a blank one: there is nothing to learn from it."""
    text = text_of(row, column)
    if not text.strip():
        raise RowError(f"{column} is empty")
    return text


def optional_text(row: Row, column: str | None) -> str:
    """Returns the row's text, or "" where the column is absent or null."""
    if column is None or row.get(column) is None:
        return ""
    return text_of(row, column)


def number_of(row: Row, column: str) -> float:
    """Returns a finite number, given as such or as text (CSV)."""
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RowError(f"{column} is not a number", repr(value)[:40])
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise RowError(f"{column} is not a number", repr(value)[:40]) from None
    if not math.isfinite(number):
        raise RowError(f"{column} is not a number", str(number))
    return number


def is_turn(value: object) -> bool:
    """Returns whether a value looks like one turn: {role, content} or {from, value}."""
    return isinstance(value, dict) and bool({"role", "from"} & set(value))


def turns_of(value: object, column: str) -> tuple[Message, ...]:
    """Returns the turns of a list of {role, content} or {from, value}, or of one such object.

    Neighbours of one role are merged (`merge_turns`).
    """
    items: Sequence[object] = [value] if isinstance(value, dict) else value  # type: ignore[assignment]
    if not isinstance(items, (list, tuple)) or not items:
        raise RowError(f"{column} holds no turns", type(value).__name__)
    return merge_turns(_turn(item, column) for item in items)


def _turn(item: object, column: str) -> Message:
    if not isinstance(item, dict) or not is_turn(item):
        raise RowError(f"{column} has a turn without role", repr(item)[:40])
    name = item.get("role", item.get("from"))
    role = _ROLES.get(str(name).strip().lower())
    if role is None:
        raise RowError(f"{column} has an unknown role", str(name))
    content = next((item[k] for k in ("content", "value", "text") if item.get(k) is not None), None)
    if isinstance(content, list):
        content = _joined_parts(content)
    if not isinstance(content, str):
        raise RowError(f"{column} has a turn without text", str(name))
    return Message(role, encodable(content, column))


def _joined_parts(parts: Sequence[object]) -> str | None:
    """Joins text parts ({type: text, text}); None where a part is an image or the like."""
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        return None
    return "".join(str(text) for text in texts)


def listed(names: Iterable[str], most: int = 12) -> str:
    """Joins column names for an error, which stays one readable line however many there are."""
    every = list(names)
    shown = ", ".join(name if len(name) <= 40 else name[:37] + "..." for name in every[:most])
    if not every:
        return "none"
    return shown if len(every) <= most else f"{shown}, ... ({len(every)} in all)"
