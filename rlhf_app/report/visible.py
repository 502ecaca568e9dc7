"""Texts of other people, made safe to show: nothing in them can steer a terminal."""

from __future__ import annotations

import unicodedata

# They make the text around them run the other way.
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible(text: str) -> str:
    r"""Returns the text with control characters written out, as in \x1b and \u202e.

    Line ends and tabs stay. Letters that are written right to left, and joined emoji, stay too.
    """
    return "".join(map(_shown, text)) if any(map(_steers, set(text))) else text


def one_line(text: str, most: int = 100) -> str:
    """Returns the beginning of a text on one line, safe to show."""
    flat = " ".join(text[: 4 * most].split())
    return visible(flat if len(flat) <= most else flat[: most - 3] + "...")


def _steers(character: str) -> bool:
    if character in "\n\t":
        return False
    return character in _DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs")


def _shown(character: str) -> str:
    if not _steers(character):
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
