"""What to write for a source whose columns fit no shape: only what their names make likely."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from data_sources.compressed import plain_name
from data_sources.raw_rows import RawRow
from rlhf_app.config.column_names import ALIASES

#: Stands where nobody can tell which column it is.
PLACEHOLDER = "COLUMN"
_LIKELY = 0.75
_NAME_AT_MOST = 60
_WORDS_AT_MOST = 4
HEADLESS = "its first line looks like a row, not like a header"


def suggested_columns(candidates: Sequence[str]) -> dict[str, str]:
    """Returns ours -> theirs, with `PLACEHOLDER` where no name comes near.

    Args:
        candidates: columns that hold texts, nested ones by dots.
    """
    likely = sorted(
        (
            (_likeness(name, part), -place, part, name)
            for part in ("prompt", "chosen", "rejected", "response")
            for place, name in enumerate(candidates)
        ),
        reverse=True,
    )
    found: dict[str, str] = {}
    for likeness, _, part, name in likely:
        if likeness >= _LIKELY and part not in found and name not in found.values():
            found[part] = name
    pair = "chosen" in found or "rejected" in found
    parts = ("prompt", "chosen", "rejected") if pair else ("prompt", "response")
    return {part: found.get(part, PLACEHOLDER) for part in parts}


def _likeness(name: str, part: str) -> float:
    """1 where a word of the name is one of the part's, else how alike the last part is to one."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    if words & set(ALIASES[part]):
        return 1.0
    last = name.lower().rpartition(".")[2]
    return max(SequenceMatcher(None, last, alias).ratio() for alias in ALIASES[part])


def is_headless(row: RawRow) -> bool:
    """Returns whether the names of a CSV or TSV file's columns look like a row's values.

    That is: each is a sentence, or differs from the value below it in numbers alone.

    Args:
        row: the file's first.
    """
    file = plain_name(row.where.rpartition(" row ")[0])
    if not file.endswith((".csv", ".tsv")) or not row.values:
        return False
    return all(_is_value(name, value) for name, value in row.values.items())


def _is_value(name: str, below: Any) -> bool:
    if len(name) > _NAME_AT_MOST or len(name.split()) > _WORDS_AT_MOST:
        return True
    if name.strip().endswith((".", "?", "!")):
        return True
    return re.search(r"\d", name) is not None and _numberless(name) == _numberless(str(below))


def _numberless(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def as_yaml(source: str, columns: Mapping[str, str]) -> str:
    """Returns the setting that names the columns of a source."""
    import yaml

    sources = {"sources": [{"path": source, "columns": dict(columns)}]}
    text = yaml.safe_dump(
        sources, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return f"data: {text.strip()}"
