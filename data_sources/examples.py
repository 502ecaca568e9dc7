"""Records to token ids, one function per stage. Every row left out is counted by its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from data_sources.records import Record
from rlhf_app.models.chat_format import ChatFormat, UnsupportedTurns

NO_TARGET = "no answer to imitate"
NO_PAIR = "no pair of answers"
IDENTICAL = "chosen and rejected are identical"
REFUSED = "the chat template refuses the turns"
PROMPT_TOO_LONG = "prompt fills the length limit"
PAIR_TOO_LONG = "pair longer than the limit"
EMPTY_IDS = "sampled answer has no token"
TRUNCATED = "answer truncated (kept)"


@dataclass(frozen=True, slots=True)
class SequenceExample:
    """A prompt and an answer.

    Attributes:
        uid: the record's uid.
        input_ids: prompt and answer.
        response_start: index of the answer's first token; loss and score start there.
        truncated: the answer was cut at the length limit, and has no end token for it.
    """

    uid: str
    input_ids: list[int]
    response_start: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class PairExample:
    """Two answers to one prompt, and how much better the first is (0 where unknown)."""

    uid: str
    chosen: SequenceExample
    rejected: SequenceExample
    margin: float


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A prompt to answer: its ids, its text as the model sees it, and where it came from."""

    uid: str
    input_ids: list[int]
    text: str
    record: Record


def turns(record: Record) -> list[tuple[str, str]]:
    """Returns the record's prompt as (role, content) turns."""
    return [(message.role, message.content) for message in record.messages]


def sft_examples(
    records: Sequence[Record], fmt: ChatFormat, tok_hash: str, max_length: int
) -> tuple[list[SequenceExample], Counter[str]]:
    """Returns (examples, reasons of rows dropped or truncated).

    An answer past `max_length` is cut there; a row whose prompt leaves it no room is dropped,
    since it would carry no loss.

    Args:
        records: rows of the SFT stage.
        fmt: chat format of the model in training.
        tok_hash: `tokenizer_hash` of that model's tokenizer; sampled ids of another tokenizer
            are ignored in favour of their text.
        max_length: most tokens of prompt and answer.
    """
    examples: list[SequenceExample] = []
    reasons: Counter[str] = Counter()
    for record in records:
        if record.sft_target is None:
            reasons[NO_TARGET] += 1
            continue
        which = "response" if record.response is not None else "chosen"
        example = _sequence(record, which, record.sft_target, fmt, tok_hash, reasons)
        if example is None:
            continue
        if example.response_start >= max_length:
            reasons[PROMPT_TOO_LONG] += 1
            continue
        if len(example.input_ids) > max_length:
            reasons[TRUNCATED] += 1
            example = SequenceExample(
                example.uid, example.input_ids[:max_length], example.response_start, True
            )
        examples.append(example)
    return examples, reasons


def pair_examples(
    records: Sequence[Record], fmt: ChatFormat, tok_hash: str, max_length: int
) -> tuple[list[PairExample], Counter[str]]:
    """Returns (pairs, reasons of rows dropped); arguments as `sft_examples`.

    A pair with an answer past `max_length` is dropped, not cut: a score at the cut would be a
    score of another answer. So is a pair whose answers encode to the same ids.
    """
    examples: list[PairExample] = []
    reasons: Counter[str] = Counter()
    for record in records:
        if record.chosen is None or record.rejected is None:
            reasons[NO_PAIR] += 1
            continue
        chosen = _sequence(record, "chosen", record.chosen, fmt, tok_hash, reasons)
        if chosen is None:
            continue
        rejected = _sequence(record, "rejected", record.rejected, fmt, tok_hash, reasons)
        if rejected is None:
            continue
        if chosen.input_ids == rejected.input_ids:
            reasons[IDENTICAL] += 1
        elif max(len(chosen.input_ids), len(rejected.input_ids)) > max_length:
            reasons[PAIR_TOO_LONG] += 1
        else:
            examples.append(PairExample(record.uid, chosen, rejected, record.margin or 0.0))
    return examples, reasons


def prompt_examples(
    records: Sequence[Record], fmt: ChatFormat, tok_hash: str, max_prompt_length: int
) -> tuple[list[PromptExample], Counter[str]]:
    """Returns (prompts, reasons of rows dropped); arguments as `sft_examples`.

    Prompts are the ids that `ChatFormat.encode` puts before an answer. Longer ones than
    `max_prompt_length` tokens are dropped. Repeated prompts are kept.
    """
    examples: list[PromptExample] = []
    reasons: Counter[str] = Counter()
    for record in records:
        try:
            text = fmt.prompt_text(turns(record), record.rendered)
            if record.ids is not None and record.ids.tokenizer == tok_hash and record.ids.prompt:
                ids = list(record.ids.prompt)
            else:
                ids = fmt.prompt_ids(turns(record), record.rendered)
        except UnsupportedTurns:
            reasons[REFUSED] += 1
            continue
        if len(ids) > max_prompt_length:
            reasons[PROMPT_TOO_LONG] += 1
            continue
        examples.append(PromptExample(record.uid, ids, text, record))
    return examples, reasons


def _sequence(
    record: Record,
    which: str,
    answer: str,
    fmt: ChatFormat,
    tok_hash: str,
    reasons: Counter[str],
) -> SequenceExample | None:
    """Encodes one answer, or takes the ids as they were sampled; None after counting why not."""
    sampled = record.ids
    if sampled is not None and sampled.tokenizer == tok_hash and sampled.prompt:
        answer_ids = {
            "response": sampled.response,
            "chosen": sampled.chosen,
            "rejected": sampled.rejected,
        }[which]
        if not answer_ids:
            reasons[EMPTY_IDS] += 1
            return None
        # The sampled ids are the truth: they hold an end token if and only if one was sampled.
        return SequenceExample(
            record.uid, [*sampled.prompt, *answer_ids], len(sampled.prompt), False
        )
    try:
        encoded = fmt.encode(turns(record), answer, record.rendered)
    except UnsupportedTurns:
        reasons[REFUSED] += 1
        return None
    return SequenceExample(record.uid, encoded.ids, encoded.response_start, False)
