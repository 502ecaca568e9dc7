"""Rows longer than the limit: what each policy of `data.truncation` keeps of them.

drop            nothing: the row is left out.
right           the beginning; the end of the answer is lost, and its end token with it.
left            the end; the beginning of the prompt is lost, BOS stays, the answer stays whole.
keep_last_turns whole turns: the system turn, and as many of the last exchanges as fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from data_sources.records import Message

Policy = Literal["drop", "left", "right", "keep_last_turns"]
Span = tuple[int, int]
Made = TypeVar("Made")


def without_oldest_turns(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Returns the prompt whole, then without its first exchange, without its first two, ...

    Each one starts with the system turn, where there is one, and a user turn.
    """
    head = tuple(messages[:1]) if messages and messages[0].role == "system" else ()
    body = tuple(messages[len(head) :])
    starts = [place for place, turn in enumerate(body) if turn.role == "user" and place > 0]
    return [tuple(messages), *((*head, *body[start:]) for start in starts)]


def most_turns(
    messages: Sequence[Message],
    make: Callable[[tuple[Message, ...]], Made | None],
    fits: Callable[[Made], bool],
) -> tuple[tuple[Message, ...], Made] | None:
    """Returns the longest prompt out of `without_oldest_turns` that fits, or None.

    Args:
        messages: a prompt that does not fit as a whole.
        make: encodes a row with that prompt; None where it cannot be encoded.
        fits: whether an encoded row is short enough.
    """

    def good(turns: tuple[Message, ...]) -> bool:
        made = make(turns)
        return made is not None and fits(made)

    choices = without_oldest_turns(messages)
    # Fewer turns are fewer tokens, so that not every choice has to be encoded.
    first = bisect_left(choices, True, lo=1, key=good)
    if first >= len(choices):
        return None
    made = make(choices[first])
    return None if made is None else (choices[first], made)


def cut_left(ids: Sequence[int], room: int, prefix: Sequence[int]) -> list[int] | None:
    """Returns the last `room` ids of a prompt, BOS in front; None where there is no room.

    Args:
        ids: longer than `room`.
        room: most ids to keep, the prefix among them.
        prefix: what the tokenizer puts first, kept where the prompt starts with it.
    """
    kept = list(prefix) if list(ids[: len(prefix)]) == list(prefix) else []
    rest = room - len(kept)
    if rest <= 0:
        return None
    return [*kept, *ids[len(ids) - rest :]]


def moved(spans: Sequence[Span], by: int, first: int) -> tuple[Span, ...]:
    """Returns the spans after a cut at the left, those that lost a part of it left out.

    Args:
        spans: places before the cut.
        by: how many ids were taken out.
        first: place after the cut of the first id that was behind it.
    """
    return tuple((start - by, end - by) for start, end in spans if start - by >= first)


def clipped(spans: Sequence[Span], length: int) -> tuple[Span, ...]:
    """Returns the spans' parts within the first `length` places."""
    return tuple((start, min(end, length)) for start, end in spans if start < length)
