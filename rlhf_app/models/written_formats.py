r"""The two formats without a chat template: turns with names, and texts as they stand."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_app.models.turn_spans import Span, Turn, answers

#: Between a prompt's end and the answer that follows its last mark.
HUMAN_LEAD = " "
_NAMES = {"user": "Human", "assistant": "Assistant", "tool": "Tool"}


def human_assistant(messages: Sequence[Turn]) -> str:
    r"""Returns `\n\nHuman: ...\n\nAssistant: ...\n\nAssistant:`; a system turn has no name."""
    return "".join(_pieces(messages)) + "\n\nAssistant:"


def human_assistant_spans(messages: Sequence[Turn]) -> list[Span]:
    """Returns the characters of the assistant's turns, the blank before each included."""
    spans, at = [], 0
    answering = set(answers(messages))
    for place, piece in enumerate(_pieces(messages)):
        at += len(piece)
        if place in answering:
            spans.append((at - len(messages[place][1]) - len(HUMAN_LEAD), at))
    return spans


def plain(messages: Sequence[Turn]) -> str:
    """Returns the contents, joined by a blank line."""
    return "\n\n".join(content for _, content in messages)


def plain_spans(messages: Sequence[Turn]) -> list[Span]:
    """Returns the characters of the assistant's turns."""
    spans, at = [], 0
    answering = set(answers(messages))
    for place, (_, content) in enumerate(messages):
        if place in answering:
            spans.append((at, at + len(content)))
        at += len(content) + 2
    return spans


def _pieces(messages: Sequence[Turn]) -> list[str]:
    return [
        content if role == "system" else f"\n\n{_NAMES[role]}: {content}"
        for role, content in messages
    ]
