"""Datasets whose answers come with scores, ranks or labels of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from data_sources.fields import Row, RowError, answer_of, number_of, text_of
from data_sources.named.dataset import NamedDataset
from data_sources.named.preferences import TIED_NOTE
from data_sources.normalise import Columns, Normalised, preference, prompt_of, prompt_response
from data_sources.ranked import TIED, ranking
from data_sources.raw_rows import BadRow, RawRow
from data_sources.records import Record

# Between the turns of HelpSteer's prompts; the first turn has none.
_MARK = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")


def _helpsteer_prompt(row: Row) -> str | list[dict[str, str]]:
    text = text_of(row, "prompt")
    pieces = _MARK.split(text)
    if len(pieces) == 1:
        return text
    names = ["User", *pieces[1::2]]
    return [
        {"role": name.lower(), "content": piece}
        for name, piece in zip(names, pieces[::2], strict=True)
    ]


def _helpsteer(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """HelpSteer2's answers of one prompt: the more helpful one (0 to 4) is chosen."""
    row = {**row, "prompt": _helpsteer_prompt(row)}
    if "response" in row:
        return prompt_response(row, {"prompt": "prompt", "response": "response"}, verbatim)
    try:
        return ranking(row, columns, verbatim)
    except RowError as error:
        if error.reason != TIED:
            raise
        first = {"prompt": row["prompt"], "response": row["responses"][0]["response"]}
        made = prompt_response(first, {"prompt": "prompt", "response": "response"}, verbatim)
        return Normalised(made.records, (TIED_NOTE,))


def _join_answers(rows: Iterable[RawRow | BadRow]) -> Iterator[tuple[RawRow | BadRow, int]]:
    """Puts the answers to one prompt into one row; a prompt with one answer keeps it."""
    groups: dict[str, list[RawRow]] = {}
    for row in rows:
        if isinstance(row, BadRow):
            yield row, 1
        else:
            groups.setdefault(str(row.values.get("prompt")), []).append(row)
    for group in groups.values():
        if len(group) == 1:
            yield group[0], 1
            continue
        answers = [
            {"response": row.values.get("response"), "score": row.values.get("helpfulness")}
            for row in group
        ]
        values = {"prompt": group[0].values.get("prompt"), "responses": answers}
        yield RawRow(group[0].where, values), len(group)


def _helpsteer_preference(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """HelpSteer2's preferences: strength -3 to 3, where a negative one is for the first answer."""
    lead = number_of(row, "preference_strength")
    prompt = prompt_of({"prompt": _helpsteer_prompt(row)}, columns, verbatim)
    first, second = (
        prompt.answer(answer_of(row, name), verbatim) for name in ("response_1", "response_2")
    )
    if lead == 0:
        return Normalised((Record(prompt.messages, response=first),), (TIED_NOTE,))
    chosen, rejected = (first, second) if lead < 0 else (second, first)
    return Normalised((Record(prompt.messages, chosen=chosen, rejected=rejected),))


def _kto(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    if "chosen" in row:
        parts = {name: name for name in ("prompt", "chosen", "rejected")}
        return preference(row, parts, verbatim)
    return prompt_response(row, columns, verbatim)


def _join_labels(rows: Iterable[RawRow | BadRow]) -> Iterator[tuple[RawRow | BadRow, int]]:
    """Makes a pair of a good and a bad answer to one prompt; what is left over stays a row."""
    waiting: dict[str, dict[bool, list[RawRow]]] = {}
    for row in rows:
        label = row.values.get("label") if isinstance(row, RawRow) else None
        if isinstance(row, BadRow) or not isinstance(label, bool):
            yield row, 1
            continue
        key = json.dumps(row.values.get("prompt"), sort_keys=True, default=str)
        sides = waiting.setdefault(key, {True: [], False: []})
        if not sides[not label]:
            sides[label].append(row)
            continue
        other = sides[not label].pop(0)
        good, bad = (row, other) if label else (other, row)
        values: dict[str, Any] = {
            "prompt": row.values.get("prompt"),
            "chosen": good.values.get("completion"),
            "rejected": bad.values.get("completion"),
        }
        yield RawRow(other.where, values), 2
    for sides in waiting.values():
        for single in (*sides[True], *sides[False]):
            yield single, 1


RATINGS: dict[str, NamedDataset] = {
    # One row per prompt with four answers; overall_score decides.
    "openbmb/UltraFeedback": NamedDataset("openbmb/UltraFeedback"),
    "berkeley-nest/Nectar": NamedDataset("berkeley-nest/Nectar"),
    "nvidia/HelpSteer2": NamedDataset(
        "nvidia/HelpSteer2",
        _helpsteer,
        {"prompt": "prompt", "responses": "responses"},
        "prompt + rated answers",
        _join_answers,
        evaluation=("validation",),
    ),
    "nvidia/HelpSteer2:preference": NamedDataset(
        "nvidia/HelpSteer2",
        _helpsteer_preference,
        {"prompt": "prompt"},
        "two answers with a preference",
        row_splits=("train", "val"),
        config_is_folder=True,
    ),
    "trl-lib/kto-mix-14k": NamedDataset(
        "trl-lib/kto-mix-14k",
        _kto,
        {"prompt": "prompt", "response": "completion", "label": "label"},
        "prompt + labelled completions",
        _join_labels,
        evaluation=("test",),
    ),
}
