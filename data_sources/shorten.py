"""Examples beyond the length limit become shorter, or the row is lost; both are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from data_sources.encoder import Encoder, PromptExample, RowLost, SequenceExample
from data_sources.truncation import Policy, clipped, cut_left, most_turns, moved
from rlhf_app.models.chat_format import ChatFormat

IDENTICAL = "chosen and rejected are identical"
PROMPT_TOO_LONG = "prompt fills the length limit"
PAIR_TOO_LONG = "pair longer than the limit"
ROW_TOO_LONG = "row longer than the limit"
NO_ROOM = "answer leaves the prompt no room"
LAST_TURN_TOO_LONG = "last turn alone longer than the limit"
TRUNCATED = "answer truncated (kept)"
PROMPT_CUT = "prompt cut at its start (kept)"
PROMPT_END_CUT = "prompt cut at its end (kept)"
TURNS_CUT = "oldest turns left out (kept)"


def shorter(
    encoder: Encoder,
    example: SequenceExample,
    which: str,
    limit: int,
    truncation: Policy,
    reasons: Counter[str],
) -> SequenceExample:
    """Returns an SFT example that fits, out of one that is too long.

    Args:
        encoder: of its record.
        example: longer than `limit`.
        which: the answer in use.
        limit: most tokens of prompt and answer.
        truncation: what to keep.
        reasons: counts what was cut.

    Raises:
        RowLost: nothing that could be trained on is left.
    """
    if truncation == "drop":
        raise RowLost(ROW_TOO_LONG)
    if truncation == "keep_last_turns":
        found = most_turns(
            encoder.record.messages,
            lambda messages: encoder.sequence(messages, which),
            lambda made: len(made.input_ids) <= limit,
        )
        return _counted(None if found is None else found[1], TURNS_CUT, reasons)
    if truncation == "left":
        return _counted(_cut_prompt(example, example, limit, encoder.fmt), PROMPT_CUT, reasons)
    earlier = clipped(example.earlier, limit)
    if example.response_start >= limit and not earlier:
        raise RowLost(PROMPT_TOO_LONG)
    reasons[TRUNCATED] += 1
    start = min(example.response_start, limit)
    return replace(
        example,
        input_ids=example.input_ids[:limit],
        response_start=start,
        truncated=True,
        earlier=earlier,
    )


def _counted(example: SequenceExample | None, what: str, reasons: Counter[str]) -> SequenceExample:
    if example is None:
        raise RowLost(LAST_TURN_TOO_LONG if what == TURNS_CUT else NO_ROOM)
    reasons[what] += 1
    return example


def _cut_prompt(
    example: SequenceExample, longest: SequenceExample, limit: int, fmt: ChatFormat
) -> SequenceExample | None:
    """The example with a prompt that leaves room for the answer of `longest`."""
    start = example.response_start
    room = limit - (len(longest.input_ids) - longest.response_start)
    if start <= room:
        return example
    prompt = cut_left(example.input_ids[:start], room, fmt.prefix_ids)
    if prompt is None:
        return None
    return replace(
        example,
        input_ids=[*prompt, *example.input_ids[start:]],
        response_start=len(prompt),
        earlier=moved(example.earlier, start - len(prompt), len(fmt.prefix_ids)),
    )


def longest(pair: Sequence[SequenceExample]) -> int:
    """Returns the tokens of the longer answer, its prompt included."""
    return max(len(example.input_ids) for example in pair)


def shorter_pair(
    encoder: Encoder,
    pair: tuple[SequenceExample, SequenceExample],
    limit: int,
    truncation: Policy,
    reasons: Counter[str],
) -> tuple[SequenceExample, SequenceExample]:
    """Returns a pair that fits, out of one that is too long; see `shorter`."""
    if truncation == "drop":
        raise RowLost(PAIR_TOO_LONG)
    if truncation == "keep_last_turns":
        found = most_turns(
            encoder.record.messages, encoder.pair, lambda made: longest(made) <= limit
        )
        if found is None:
            raise RowLost(LAST_TURN_TOO_LONG)
        reasons[TURNS_CUT] += 1
        return found[1]
    if truncation == "left":
        widest = max(pair, key=lambda example: len(example.input_ids) - example.response_start)
        chosen, rejected = (_cut_prompt(side, widest, limit, encoder.fmt) for side in pair)
        if chosen is None or rejected is None:
            raise RowLost(NO_ROOM)
        reasons[PROMPT_CUT] += 1
        return chosen, rejected
    if max(example.response_start for example in pair) >= limit:
        raise RowLost(PROMPT_TOO_LONG)
    chosen, rejected = (
        replace(side, input_ids=side.input_ids[:limit], truncated=len(side.input_ids) > limit)
        for side in pair
    )
    if chosen.input_ids == rejected.input_ids:
        raise RowLost(IDENTICAL)
    reasons[TRUNCATED] += 1
    return chosen, rejected


def shorter_prompt(
    encoder: Encoder,
    prompt: PromptExample,
    limit: int,
    truncation: Policy,
    reasons: Counter[str],
) -> PromptExample:
    """Returns a prompt that fits, its text being what is left; see `shorter`."""
    if truncation == "drop":
        raise RowLost(PROMPT_TOO_LONG)
    if truncation == "keep_last_turns":
        found = most_turns(
            encoder.record.messages, encoder.prompt, lambda made: len(made.input_ids) <= limit
        )
        if found is None:
            raise RowLost(LAST_TURN_TOO_LONG)
        reasons[TURNS_CUT] += 1
        return found[1]
    prefix = encoder.fmt.prefix_ids
    if truncation == "left":
        ids = cut_left(prompt.input_ids, limit, prefix)
        if ids is None:
            raise RowLost(PROMPT_TOO_LONG)
    else:
        ids = prompt.input_ids[:limit]
    reasons[PROMPT_CUT if truncation == "left" else PROMPT_END_CUT] += 1
    shown = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
    text = encoder.fmt.tokenizer.decode(shown, clean_up_tokenization_spaces=False)
    return replace(prompt, input_ids=ids, text=text)
