"""The names that `data.sources[].columns` maps other columns to, and what a wrong one may mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Part -> names (compared without case) of columns that play it without any setting.
ALIASES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "instruction", "query", "history"),
    "response": ("response", "completion", "answer", "output", "human_answers"),
    "chosen": ("chosen", "chosen_response", "selected", "preferred", "accepted"),
    "rejected": ("rejected", "rejected_response", "dispreferred"),
    "messages": ("messages", "conversations", "conversation"),
    "responses": ("responses", "answers", "completions"),
    "scores": ("scores",),
    "ranks": ("ranks", "rank"),
    "system": ("system", "system_prompt"),
    "input": ("input",),
    "history": ("history",),
    "label": ("label",),
    "positive_passages": ("positive_passages", "positive", "positives", "pos"),
    "negative_passages": ("negative_passages", "negative", "negatives", "neg"),
}
# Of shapes that are known by the exact names of their columns, and what accompanies others.
_EXACT = (
    *("margin", "text", "tools", "rendered", "tokenizer"),
    *("answer_0", "answer_1", "score_0", "score_1"),
    *("response_j", "response_k", "score_j", "score_k"),
    *("response_0", "response_1", "better_response_id"),
    *("human_ref_A", "human_ref_B", "labels"),
    *("message_id", "parent_id", "role", "deleted"),
)
#: What `columns` may name where no normaliser reads the rows.
OURS = (*ALIASES, *_EXACT, *(name for names in ALIASES.values() for name in names))


def unknown_names(names: Iterable[str]) -> str:
    """Returns what is wrong with the first name that is not ours, or an empty text."""
    for name in names:
        if name in OURS:
            continue
        close = difflib.get_close_matches(name.lower(), OURS, n=1, cutoff=0.6)
        meant = f"; did you mean {close[0]}?" if close else f"; ours are {', '.join(ALIASES)}"
        return f"columns maps ours to theirs, and {name!r} is none of ours{meant}"
    return ""
