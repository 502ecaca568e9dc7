r"""Turns written inside one string: Anthropic's and DeepSpeed-Chat's prompts.

\n\nHuman: hello\n\nAssistant: hi\n\nHuman: bye\n\nAssistant:     (HH-RLHF, rm-static)
 Human: hello Assistant:                                         (DeepSpeed-Chat)
User: hello\nAssistant:                                          (its extensions)
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from data_sources.records import Message, Role

ASSISTANT_MARK = "\n\nAssistant:"

_TURN = re.compile(r"(?:^\s*|\n\n)(Human|Assistant):")
# One framed prompt. "\\n" is two characters: some files escape their newlines twice.
_FRAME = re.compile(
    r"^\s*(?:Human|User|USER):(?P<body>.*?)(?:\s|\\n)(?:Assistant|ASSISTANT):\s*$", re.DOTALL
)
_FRAMED_TURN = re.compile(r"(?:\n|\\n)\s*(Human|User|USER|Assistant|ASSISTANT):")


def parse_turns(text: str) -> tuple[Message, ...] | None:
    """Returns the turns written inside `text`, or None where it holds none.

    Contents are stripped, and neighbours of one role are merged. A final empty
    `Assistant:` only asks for an answer and is left out; a final assistant turn with text is
    returned as the last message. Text before the first turn becomes a system message.
    """
    marks = list(_TURN.finditer(text))
    if any(mark.group(1) == "Human" for mark in marks):
        turns = [("system", text[: marks[0].start()])]
        ends = [mark.start() for mark in marks[1:]] + [len(text)]
        for mark, end in zip(marks, ends, strict=True):
            turns.append((mark.group(1), text[mark.end() : end]))
        # DeepSpeed-Chat separates the final mark by a blank only.
        if len(marks) > 1 or not _FRAME.match(text):
            return merge_turns(Message(_role(name), body) for name, body in turns)
    frame = _FRAME.match(text)
    if frame is None:
        return None
    pieces = _FRAMED_TURN.split(frame["body"])
    turns = [("Human", pieces[0])]
    turns += [(pieces[i], pieces[i + 1]) for i in range(1, len(pieces), 2)]
    return merge_turns(
        Message(_role(name), body.strip().removesuffix("\\n")) for name, body in turns
    )


def _role(name: str) -> Role:
    if name == "system":
        return "system"
    return "assistant" if name.lower() == "assistant" else "user"


def merge_turns(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Strips contents, drops empty turns and joins neighbours of one role by a blank line.

    Chat templates refuse two turns of one role in a row; a few rows of most human data have
    them.
    """
    merged: list[Message] = []
    for message in messages:
        content = message.content.strip()
        if not content:
            continue
        if merged and merged[-1].role == message.role:
            content = merged.pop().content + "\n\n" + content
        merged.append(Message(message.role, content))
    return tuple(merged)


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str] | None:
    r"""Splits two transcripts at the last `\n\nAssistant:` that both have at the same place.

    Returns:
        (prompt up to and including the mark, rest of chosen, rest of rejected), or None where
        they share no such mark.
    """
    shared = 0
    for a, b in zip(chosen, rejected, strict=False):
        if a != b:
            break
        shared += 1
    at = chosen.rfind(ASSISTANT_MARK, 0, shared)
    if at < 0:
        return None
    cut = at + len(ASSISTANT_MARK)
    return chosen[:cut], chosen[cut:], rejected[cut:]
