r"""Where the assistant's earlier turns lie in a rendered conversation.

Their characters are told by the `{% generation %}` marks of a chat template where it has them.
Else by difference: what the rendering up to a turn's end has beyond the rendering of its prompt.
That asks for prefixes that nest, each one the beginning of the next. Templates that rewrite
earlier turns (some drop their reasoning), or that write something at the very end, do not.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

Turn = tuple[str, str]
#: First character or token, and the one after the last.
Span = tuple[int, int]

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class UnsupportedTurns(ValueError):
    """The chat template refuses these turns; the row is dropped and counted."""


class TurnsDoNotNest(UnsupportedTurns):
    """The template writes earlier turns otherwise than it wrote them when they were the last."""


def has_marks(template: object) -> bool:
    """Whether a chat template marks what the assistant writes."""
    return isinstance(template, str) and _MARK.search(template) is not None


def answers(turns: Sequence[Turn]) -> Iterator[int]:
    """Yields the places of assistant turns that answer something: a user turn comes before."""
    asked = False
    for place, (role, _) in enumerate(turns):
        asked = asked or role == "user"
        if role == "assistant" and asked:
            yield place


def marked_spans(
    template: str, special_tokens: Mapping[str, object], turns: Sequence[Turn], text: str
) -> list[Span]:
    """Returns the characters inside `{% generation %}` blocks, as transformers tracks them.

    Args:
        template: with marks.
        special_tokens: names and texts that the template may use.
        turns: the conversation.
        text: its rendering with the generation prompt.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, spans = render_jinja_template(
        conversations=[[{"role": role, "content": content} for role, content in turns]],
        chat_template=template,
        return_assistant_tokens_mask=True,
        add_generation_prompt=True,
        **special_tokens,
    )
    assert rendered[0] == text, "a template renders the same conversation twice"
    return [(int(start), int(end)) for start, end in spans[0]]


def nested_spans(
    render: Callable[[Sequence[Turn], bool], str], turns: Sequence[Turn], text: str
) -> list[Span]:
    """Returns the characters that each assistant turn adds to the rendering of its prompt.

    Args:
        render: (turns, whether to ask for an answer) -> text.
        turns: the conversation.
        text: its rendering with the generation prompt.

    Raises:
        TurnsDoNotNest: a shorter rendering is not the beginning of `text`.
    """
    spans = []
    for place in answers(turns):
        prompt = render(turns[:place], True)
        answered = render(turns[: place + 1], False)
        if not (answered.startswith(prompt) and text.startswith(answered)):
            raise TurnsDoNotNest(
                f"the rendering up to turn {place + 1} is not the beginning of the whole"
            )
        spans.append((len(prompt), len(answered)))
    return spans


def token_span(
    ids: Sequence[int], ends: Sequence[int], span: Span, stop_ids: Collection[int]
) -> Span:
    """Returns the tokens of a turn's characters; they end with its first stop token.

    A token that reaches past the turn's beginning belongs to it, and one that reaches past its
    end does not: the rule of the last answer, at both sides.

    Args:
        ids: tokens of the whole text.
        ends: of each token, the place after its last character.
        span: characters of the turn.
        stop_ids: tokens that end an answer.
    """
    first, last = (bisect_right(ends, place) for place in span)
    stop = next((i for i in range(first, last) if ids[i] in stop_ids), last - 1)
    return first, stop + 1
