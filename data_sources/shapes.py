"""Recognising what a source holds from its columns and its first rows, without configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data_sources import normalise, ranked
from data_sources.fields import Row, is_turn, listed
from data_sources.normalise import Columns, Normalised
from data_sources.raw_rows import BadRow, RawRow
from data_sources.suggested_columns import PLACEHOLDER, as_yaml, suggested_columns
from data_sources.transcripts import ASSISTANT_MARK
from rlhf_app.config.column_names import ALIASES
from rlhf_app.errors import ConfigError

Normaliser = Callable[[Row, Columns, bool], Normalised]
# Rows -> (row, number of rows that it was made of)
Join = Callable[[Iterable[RawRow | BadRow]], Iterator[tuple[RawRow | BadRow, int]]]
_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Shape:
    """A recognised source.

    Attributes:
        name: shown to the user.
        normalise: raw row to records.
        columns: part -> the source's column that plays it.
        join: joins rows that belong together before they are normalised, or None.
        unused: columns of the source that play no part, where that is known.
    """

    name: str
    normalise: Normaliser
    columns: Columns
    join: Join | None = None
    unused: tuple[str, ...] = ()


KNOWN = (
    "prompt + chosen + rejected",
    "chosen + rejected (HH transcripts or message lists)",
    "conversations + chosen + rejected",
    "messages or conversations",
    "instruction (+ input) + output",
    "prompt + response",
    "prompt + responses + scores",
    "question + two answers with scores",
    "query + positive and negative passages",
    "reply trees",
    "prompt alone",
    "text alone",
)


# Read nothing of a row but what plays a part.
_BY_PARTS: tuple[Normaliser, ...] = (
    normalise.conversation,
    normalise.preference,
    normalise.prompt_only,
    normalise.prompt_response,
    normalise.transcripts,
    ranked.passages,
    ranked.ranking,
)


def recognise(name: str, rows: Sequence[Row], mapped: Collection[str] = ()) -> Shape:
    """Returns the shape of a source.

    Args:
        name: the source's name, for messages.
        rows: its raw rows; the first hundred are looked at.
        mapped: parts that the user has named a column for; no other column can play them.

    Raises:
        ConfigError: no shape fits, or several columns could play the same part.
    """
    seen = _Seen(name, rows[:_LOOKED_AT], mapped)
    shape = _recognised(seen)
    if shape.normalise not in _BY_PARTS:
        return shape
    used = {*shape.columns.values(), "margin", "tools"}
    return replace(shape, unused=tuple(column for column in seen.names if column not in used))


def _recognised(seen: _Seen) -> Shape:
    special = _special(seen)
    if special is not None:
        return special
    if seen.has("chosen") and seen.has("rejected"):
        return _pairs(seen)
    if seen.has("prompt") and seen.has("responses") and not seen.has("response"):
        parts = ("prompt", "responses")
        return Shape(
            "prompt + ranked responses",
            ranked.ranking,
            seen.columns(*parts, optional=("scores", "ranks", "system", "input")),
        )
    if seen.has("messages") and seen.values("messages", lambda v: isinstance(v, list)):
        return Shape(
            "conversations" if seen.is_sharegpt() else "messages",
            normalise.conversation,
            seen.columns("messages", optional=("system", "label")),
        )
    if seen.has("prompt") and seen.has("response"):
        columns = seen.columns(
            "prompt", "response", optional=("system", "input", "history", "label")
        )
        alpaca = columns["prompt"].lower() == "instruction"
        return Shape(
            "instruction + output" if alpaca else "prompt + response",
            normalise.prompt_response,
            columns,
        )
    if seen.has("prompt") and seen.has("label") and seen.values("label", _is_answer):
        # pvduy/sharegpt_alpaca_oa_vicuna_format calls its answers so.
        columns = seen.columns("prompt", "label", optional=("system",))
        columns["response"] = columns.pop("label")
        return Shape("prompt + response", normalise.prompt_response, columns)
    if seen.has("prompt") and not (seen.has("chosen") or seen.has("rejected")):
        return Shape(
            "prompt alone",
            normalise.prompt_only,
            seen.columns("prompt", optional=("system", "input", "history")),
        )
    if "text" in seen.names and not seen.has("label"):
        return Shape("text alone", normalise.prompt_only, {"prompt": "text"})
    raise seen.unknown()


def _special(seen: _Seen) -> Shape | None:
    """Shapes that are known by the exact names of their columns."""
    names = seen.names
    if seen.mostly(lambda r: r.get("rendered") is True) and "prompt" in names:
        return Shape("sampled answers", normalise.sampled, {})
    if seen.mostly(lambda r: isinstance(r.get("prompt"), dict) and "replies" in r["prompt"]):
        return Shape("reply trees", ranked.reply_tree, {})
    if {"message_id", "parent_id", "text", "role"} <= set(names):
        return Shape("reply tree messages", ranked.reply_tree, {}, ranked.assemble_trees)
    pairs = (
        {"human_ref_A", "human_ref_B", "labels"},
        {"answer_0", "answer_1", "score_0", "score_1"},
        {"response_0", "response_1", "better_response_id"},
        {"response_j", "response_k"},
    )
    if any(pair <= set(names) for pair in pairs) and seen.has("prompt"):
        return Shape("two scored answers", ranked.scored_pair, seen.columns("prompt"))
    passages = ("positive_passages", "negative_passages")
    if seen.has("prompt") and all(seen.has(p) and seen.values(p, _is_passage) for p in passages):
        return Shape("question + passages", ranked.passages, seen.columns("prompt", *passages))
    return None


def _pairs(seen: _Seen) -> Shape:
    optional = ("system", "input")
    if seen.has("prompt"):
        columns = seen.columns("prompt", "chosen", "rejected", optional=optional)
        # Only this name: a column "answer" may hold a short reference solution.
        if "response" in seen.names:
            columns = {**columns, "response": "response"}
        return Shape("prompt + chosen + rejected", normalise.preference, columns)
    columns = seen.columns("chosen", "rejected")
    if seen.has("messages"):
        return Shape(
            "conversations + chosen + rejected",
            normalise.preference,
            seen.columns("messages", "chosen", "rejected", optional=("system",)),
        )
    if seen.values("chosen", lambda v: isinstance(v, str) and ASSISTANT_MARK in v):
        return Shape("chosen + rejected transcripts", normalise.transcripts, columns)
    if seen.values("chosen", lambda v: isinstance(v, list) and len(v) > 1 and is_turn(v[0])):
        return Shape("chosen + rejected conversations", normalise.transcripts, columns)
    raise seen.unknown("chosen and rejected are neither transcripts nor message lists")


def _is_passage(value: object) -> bool:
    return isinstance(value, str | list | dict)


def _is_answer(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() not in ("", "true", "false")


def _starts_with_from(value: object) -> bool:
    return isinstance(value, list) and bool(value) and is_turn(value[0]) and "from" in value[0]


class _Seen:
    """Columns that have a value in the first rows, and which part each could play."""

    def __init__(self, source: str, rows: Sequence[Row], mapped: Collection[str]) -> None:
        self.source = source
        self.rows = rows
        self.names: dict[str, None] = {
            name: None for row in rows for name, value in row.items() if value is not None
        }
        lower: dict[str, list[str]] = {}
        for name in self.names:
            lower.setdefault(name.lower(), []).append(name)
        self.parts = {
            part: [name for alias in aliases for name in lower.get(alias, [])]
            for part, aliases in ALIASES.items()
        }
        self.parts |= {part: [part] for part in mapped if part in self.names}
        # Alpaca's history accompanies an instruction; alone (SHP) it is the prompt.
        if len(self.parts["prompt"]) > 1:
            self.parts["prompt"] = [n for n in self.parts["prompt"] if n.lower() != "history"]

    def has(self, part: str) -> bool:
        return bool(self.parts[part])

    def columns(self, *parts: str, optional: Sequence[str] = ()) -> dict[str, str]:
        """Returns part -> column; optional parts where there is one.

        Raises:
            ConfigError: several columns could play a part.
        """
        chosen = {part: self._one(part) for part in parts}
        chosen |= {part: self._one(part) for part in optional if self.has(part)}
        if chosen.get("history") == chosen.get("prompt"):
            chosen.pop("history", None)
        return chosen

    def _one(self, part: str) -> str:
        names = self.parts[part]
        if len(names) > 1:
            raise ConfigError(
                f"{self.source}: columns {' and '.join(names)} could each be the {part} "
                f"(columns found: {listed(self.names)}); keep one, or say which in the config: "
                f"{as_yaml(self.source, {part: names[0]})}"
            )
        return names[0]

    def mostly(self, test: Callable[[Row], bool]) -> bool:
        """Whether at least half of the rows pass the test: one odd row decides nothing."""
        return 2 * sum(map(test, self.rows)) >= max(len(self.rows), 1)

    def values(self, part: str, test: Callable[[Any], bool]) -> bool:
        """Whether most rows that have the part pass the test."""
        (name, *_) = self.parts[part]
        found = [test(row[name]) for row in self.rows if row.get(name) is not None]
        return sum(found) * 2 > len(found)

    def is_sharegpt(self) -> bool:
        (name, *_) = self.parts["messages"]
        return self.values("messages", _starts_with_from) and bool(name)

    def unknown(self, why: str = "") -> ConfigError:
        found = listed(self.names)
        because = f" ({why})" if why else ""
        candidates = self._texts()
        suggested = suggested_columns(candidates)
        blank = f" (your columns for {PLACEHOLDER})" if PLACEHOLDER in suggested.values() else ""
        return ConfigError(
            f"{self.source}: columns {found} fit no known shape{because}; known: "
            f"{'; '.join(KNOWN)}. Texts are in {listed(candidates)}: say what they are in the "
            f"config, for example {as_yaml(self.source, suggested)}{blank}, or name a normaliser "
            f"(docs/data.md){self._rows_inside()}"
        )

    def _rows_inside(self) -> str:
        """A remark on a JSON file that is one object with rows in it."""
        for name, value in self.rows[0].items() if len(self.rows) == 1 else ():
            first = value[0] if isinstance(value, list) and len(value) > 1 else None
            if isinstance(first, dict) and not is_turn(first):
                return (
                    f"; if the rows are in {name}: a .json file must be a list of rows, or hold "
                    "one list under one key and nothing else"
                )
        return ""

    def _texts(self) -> list[str]:
        """Columns, and those one level inside objects, that hold texts or turns."""
        found: dict[str, None] = {}
        for row in self.rows:
            for name, value in row.items():
                inner = value if isinstance(value, dict) and not is_turn(value) else {"": value}
                for below, item in inner.items():
                    turns = isinstance(item, list) and bool(item) and is_turn(item[0])
                    if isinstance(item, str) or turns or is_turn(item):
                        found[f"{name}.{below}" if below else name] = None
        return list(found)
