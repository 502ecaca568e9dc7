"""Raw row -> canonical records where answers come with scores, labels or ranks.

Of several answers the best and the worst make the pair; tied ones make none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_sources.fields import Row, RowError, answer_of, listed, number_of, text_of
from data_sources.normalise import Columns, Normalised, prompt_of
from data_sources.raw_rows import BadRow, RawRow
from data_sources.records import Message, Record
from data_sources.transcripts import merge_turns

# WebGPT's answers cite their sources as [1] or [2, 3]; no other model can.
_CITATION = re.compile(r"\s?\[\d+(?:,\s*\d+)*\]")

# first answer, second answer, score of the first, score of the second
_SCORED = (
    ("response_j", "response_k", "score_j", "score_k"),
    ("answer_0", "answer_1", "score_0", "score_1"),
)
TIED = "answers are tied"


def scored_pair(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """Two answers and what says which is better.

    {response_j, response_k} with scores, or without (then j is the better one, as in
    stack-exchange-paired); WebGPT's {answer_0, answer_1, score_0, score_1}; SHP's
    {human_ref_A, human_ref_B, labels}; PKU's {response_0, response_1, better_response_id}.
    """
    if "human_ref_A" in row:
        first, second = "human_ref_A", "human_ref_B"
        lead = number_of(row, "labels") * 2 - 1
    elif "better_response_id" in row:
        first, second = "response_0", "response_1"
        lead = 1 - number_of(row, "better_response_id") * 2
    else:
        names = next((names for names in _SCORED if names[0] in row), None)
        if names is None:
            raise RowError("the two answers are missing")
        first, second, *scores = names
        lead = 1.0
        if row.get(scores[0]) is not None:
            lead = number_of(row, scores[0]) - number_of(row, scores[1])
    if lead == 0:
        raise RowError(TIED)
    question = row.get(columns["prompt"])
    if isinstance(question, dict) and "full_text" in question:
        row = {**row, columns["prompt"]: question["full_text"]}
    prompt = prompt_of(row, columns, verbatim)
    answers = [answer_of(row, name) for name in (first, second)]
    if first == "answer_0":
        answers = [_CITATION.sub("", text) for text in answers]
    chosen, rejected = (prompt.answer(text, verbatim) for text in answers[:: 1 if lead > 0 else -1])
    return Normalised((Record(prompt.messages, chosen=chosen, rejected=rejected),))


def passages(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """{query, positive_passages, negative_passages}, as MIRACL's: the first of each.

    A passage is a text, or an object with one; it may stand alone or in a list.
    """
    prompt = prompt_of(row, columns, verbatim)
    answers = [
        first_passage(row, columns.get(part, part))
        for part in ("positive_passages", "negative_passages")
    ]
    chosen, rejected = (prompt.answer(text, verbatim) for text in answers)
    return Normalised((Record(prompt.messages, chosen=chosen, rejected=rejected),))


def first_passage(row: Row, column: str) -> str:
    """Returns the first of a row's passages."""
    value = row.get(column)
    if value is None or value == []:
        raise RowError(f"{column} is empty")
    first = value[0] if isinstance(value, list) else value
    if isinstance(first, dict):
        if "text" not in first:
            raise RowError(f"{column} has a passage without text", listed(map(str, first)))
        first = first["text"]
    return answer_of({column: first}, column)


def ranking(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """{prompt, responses} with {scores} (higher is better), {ranks} (lower is), or both inside.

    Items of `responses` are texts, or objects with a text and a score or rank (Nectar,
    UltraFeedback).
    """
    column = columns["responses"]
    items = row.get(column)
    if not isinstance(items, list) or len(items) < 2:
        raise RowError(f"{column} holds fewer than two answers")
    scored = list(_scored_items(row, columns, items))
    best = max(scored, key=lambda item: item[1])
    worst = min(scored, key=lambda item: item[1])
    if best[1] == worst[1]:
        raise RowError(TIED)
    prompt = prompt_of(row, columns, verbatim)
    chosen, rejected = (prompt.answer(text, verbatim) for text in (best[0], worst[0]))
    return Normalised((Record(prompt.messages, chosen=chosen, rejected=rejected),))


def _scored_items(row: Row, columns: Columns, items: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Yields (text, goodness) of each answer."""
    column = columns["responses"]
    for i, item in enumerate(items):
        if isinstance(item, dict):
            inner = {name for name in item if item[name] is not None}
            text = next((n for n in ("response", "answer", "text", "content") if n in inner), None)
            worth = next((n for n in ("score", "overall_score", "rank") if n in inner), None)
            if text is None or worth is None:
                raise RowError(f"{column} has an item without text and score or rank")
            sign = -1 if worth == "rank" else 1
            yield answer_of(item, text), sign * number_of(item, worth)
            continue
        for name, sign in (("scores", 1), ("ranks", -1)):
            values = row.get(columns[name]) if name in columns else None
            if isinstance(values, list) and len(values) == len(items):
                cells = {column: item, name: values[i]}
                yield answer_of(cells, column), sign * number_of(cells, name)
                break
        else:
            raise RowError(f"{column} comes with no scores or ranks of the same number")


def reply_tree(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """Open-Assistant's tree of ranked replies: one record for every prompt in the tree.

    The best and the worst ranked reply make a pair; a single or unranked reply is an answer to
    imitate; none leaves the prompt. Deleted and empty replies are left out.
    """
    root = row.get("prompt")
    if not isinstance(root, dict):
        raise RowError("prompt is not a tree of messages")
    records = tuple(_tree_records(root, ()))
    if not records:
        raise RowError("tree has no prompt with text")
    return Normalised(records)


def _tree_records(node: Row, before: tuple[Message, ...]) -> Iterator[Record]:
    # An explicit stack: trees of chat sites can be deeper than Python's recursion limit.
    stack = [(node, before)]
    while stack:
        node, before = stack.pop()
        text, is_user = text_of(node, "text"), node.get("role") == "prompter"
        path = (*before, Message("user" if is_user else "assistant", text))
        replies = node.get("replies") or []
        if not isinstance(replies, (list, tuple)):
            raise RowError("replies is not a list", type(replies).__name__)
        replies = [r for r in replies if isinstance(r, dict)]
        kept = [r for r in replies if not r.get("deleted") and str(r.get("text") or "").strip()]
        if is_user and text.strip():
            yield _answered(merge_turns(path), kept)
        stack.extend((reply, path) for reply in reversed(kept))


def _answered(messages: tuple[Message, ...], replies: Sequence[Row]) -> Record:
    answers = [reply for reply in replies if reply.get("role") == "assistant"]
    places = [(number_of(r, "rank"), r) for r in answers if r.get("rank") is not None]
    places.sort(key=lambda place: place[0])
    ranked = [reply for _, reply in places]
    if len(ranked) >= 2 and places[0][0] != places[-1][0]:
        chosen, rejected = (text_of(r, "text").strip() for r in (ranked[0], ranked[-1]))
        return Record(messages, chosen=chosen, rejected=rejected)
    if answers:
        return Record(messages, response=text_of((ranked or answers)[0], "text").strip())
    return Record(messages)


def assemble_trees(rows: Iterable[RawRow | BadRow]) -> Iterator[tuple[RawRow | BadRow, int]]:
    """Joins Open-Assistant's flat messages into trees.

    Yields:
        (tree as a row, number of messages in it), or (bad row, 1) for messages that are in no
        tree. The numbers add up to the rows given.
    """
    nodes: dict[str, tuple[RawRow, dict[str, Any]]] = {}
    for row in rows:
        if isinstance(row, BadRow):
            yield row, 1
        elif not isinstance(row.values.get("message_id"), str):
            yield BadRow(row.where, "message_id is missing", ""), 1
        elif row.values["message_id"] in nodes:
            yield BadRow(row.where, "message_id is repeated", row.values["message_id"]), 1
        else:
            nodes[row.values["message_id"]] = (row, {**row.values, "replies": []})
    roots = []
    for name, (row, node) in nodes.items():
        parent = row.values.get("parent_id")
        if not parent:
            roots.append(name)
        elif isinstance(parent, str) and parent in nodes:
            nodes[parent][1]["replies"].append(node)
    reached: set[str] = set()
    for name in roots:
        row, root = nodes[name]
        members = _members(root)
        reached.update(members)
        yield RawRow(row.where, {"prompt": root}), len(members)
    for name in (name for name in nodes if name not in reached):  # in the file's order
        row, _ = nodes[name]
        yield BadRow(row.where, "its parent message is missing", str(row.values["parent_id"])), 1


def _members(root: dict[str, Any]) -> list[str]:
    names, stack = [], [root]
    while stack:
        node = stack.pop()
        names.append(node["message_id"])
        stack.extend(node["replies"])
    return names
