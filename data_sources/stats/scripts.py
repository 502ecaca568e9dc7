"""Which writing systems texts are in: a hint of their languages, by Unicode alone.

A letter's script is the first word of its Unicode name ("CYRILLIC SMALL LETTER A"). This tells
Chinese from English from Russian; it does not tell English from French.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

NO_LETTERS = "no letters"
JAPANESE = "Japanese (kana)"
_KANA = "Kana"
_HAN = "Han"
_KNOWN_BY = {
    "CJK": _HAN,
    "IDEOGRAPHIC": _HAN,
    "HIRAGANA": _KANA,
    "KATAKANA": _KANA,
    "KATAKANA-HIRAGANA": _KANA,
    "HALFWIDTH": _KANA,
    "FULLWIDTH": "Latin",
    "MICRO": "Greek",
}
# Japanese writes most of its grammar in kana; Chinese has none.
_KANA_SHARE = 0.1


@cache
def script_of(character: str) -> str | None:
    """Returns the script of a letter, "Emoji" for pictures, or None for everything else."""
    category = unicodedata.category(character)
    if category == "So" and ord(character) >= 0x2600:
        return "Emoji"
    if category not in ("Ll", "Lu", "Lt", "Lo"):
        return None
    word = unicodedata.name(character, "").split(" ")[0]
    return _KNOWN_BY.get(word, word.capitalize()) or None


def main_script(text: str) -> str:
    """Returns the script that most letters of a text are in, or `NO_LETTERS`.

    Chinese characters with a tenth of kana among them are Japanese.
    """
    found: Counter[str] = Counter()
    for character, number in Counter(text).items():
        script = script_of(character)
        if script is not None:
            found[script] += number
    if found[_KANA] > _KANA_SHARE * (found[_KANA] + found[_HAN]):
        found[JAPANESE] = found.pop(_KANA) + found.pop(_HAN, 0)
    found.pop("Emoji", None)
    return found.most_common(1)[0][0] if found else NO_LETTERS


@dataclass(slots=True)
class Scripts:
    """Texts by their main script."""

    texts: Counter[str] = field(default_factory=Counter)
    with_emoji: int = 0

    def add(self, text: str) -> None:
        """Counts one text."""
        self.texts[main_script(text)] += 1
        self.with_emoji += any(script_of(character) == "Emoji" for character in set(text))
