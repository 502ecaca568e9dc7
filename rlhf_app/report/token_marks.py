"""Token ids as text in which the marked tokens show, in colour and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from rlhf_app.report.visible import visible

OPEN, CLOSE = ">>>", "<<<"
# Shades alternate, so that the borders of tokens show.
_MARKED, _UNMARKED = ("green", "bold bright_green"), ("white", "cyan")
_MARK, _CUT = "bold magenta", "bold red"
# A character is four bytes at most, and a joined emoji a few characters.
_CONTEXT = 8


def marked_text(
    ids: Sequence[int],
    marked: Sequence[tuple[int, int]],
    tokenizer: Any,
    *,
    cut: int = 0,
    cut_end: bool = False,
) -> Text:
    """Returns the text of tokens, each marked span between >>> and <<<.

    Args:
        ids: token ids.
        marked: (first, end) of spans, in order.
        tokenizer: a Hugging Face tokenizer.
        cut: how many tokens the row lost; said at the end that lost them.
        cut_end: they were lost at the end.
    """
    text = Text()
    if cut and not cut_end:
        text.append(f"[cut: {cut} tokens] ", style=_CUT)
    starts = {start for start, end in marked if start < end}
    ends = {end for start, end in marked if start < end}
    inside = False
    for place, piece in enumerate(pieces(ids, tokenizer)):
        if place in ends:
            text.append(CLOSE, style=_MARK)
            inside = False
        if place in starts:
            text.append(OPEN, style=_MARK)
            inside = True
        text.append(visible(piece), style=(_MARKED if inside else _UNMARKED)[place % 2])
    if inside:
        text.append(CLOSE, style=_MARK)
    if cut and cut_end:
        text.append(f" [cut: {cut} tokens]", style=_CUT)
    return text


def pieces(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Returns what each token adds to the decoded text.

    A token alone decodes to less than it means: blanks and parts of characters are lost. It is
    decoded behind the tokens before it instead; a character split over several tokens shows at
    its last. The cost grows with the number of tokens, not with its square.
    """

    def decode(start: int, end: int) -> str:
        text: str = tokenizer.decode(list(ids[start:end]), clean_up_tokenization_spaces=False)
        return text

    found: list[str] = []
    shown = 0  # tokens whose text is complete
    for end in range(1, len(ids) + 1):
        start = max(shown - _CONTEXT, 0)
        before, after = decode(start, shown), decode(start, end)
        is_complete = not after.endswith("\ufffd") or end - shown >= _CONTEXT or end == len(ids)
        added = after[len(before) :] if after.startswith(before) else decode(shown, end)
        found.append(added if is_complete else "")
        shown = end if is_complete else shown
    return found
