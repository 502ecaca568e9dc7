"""Records to token ids, one function per stage. Every row left out is counted by its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from data_sources.encoder import (
    Encoder,
    LossOn,
    PairExample,
    PromptExample,
    RowLost,
    SequenceExample,
    target_spans,
    target_tokens,
    turns,
)
from data_sources.records import Record
from data_sources.shorten import IDENTICAL, longest, shorter, shorter_pair, shorter_prompt
from data_sources.truncation import Policy
from rlhf_app.models.chat_format import ChatFormat

__all__ = [
    "NO_PAIR",
    "NO_TARGET",
    "LossOn",
    "PairExample",
    "PromptExample",
    "SequenceExample",
    "pair_example",
    "pair_examples",
    "prompt_example",
    "prompt_examples",
    "sft_example",
    "sft_examples",
    "target_spans",
    "target_tokens",
    "turns",
]

Example = TypeVar("Example")

NO_TARGET = "no answer to imitate"
NO_PAIR = "no pair of answers"


def sft_examples(
    records: Sequence[Record],
    fmt: ChatFormat,
    tok_hash: str,
    max_length: int,
    *,
    truncation: Policy = "right",
    every_turn: bool = False,
) -> tuple[list[SequenceExample], Counter[str]]:
    """Returns (examples, reasons of rows dropped or truncated).

    A row in which nothing is left that carries loss is dropped whatever the policy.

    Args:
        records: rows of the SFT stage.
        fmt: chat format of the model in training.
        tok_hash: `tokenizer_hash` of that model's tokenizer; sampled ids of another tokenizer
            are ignored in favour of their text.
        max_length: most tokens of prompt and answer.
        truncation: what becomes of longer rows.
        every_turn: earlier assistant turns carry loss too; those of sampled ids and of rendered
            prompts are not known.

    Raises:
        ConfigError: with `every_turn`, where the chat template does not tell turns apart.
    """
    if every_turn:
        fmt.check_turns()
    return _each(
        lambda record, reasons: sft_example(
            record,
            fmt,
            tok_hash,
            max_length,
            reasons,
            truncation=truncation,
            every_turn=every_turn,
        ),
        records,
    )


def sft_example(
    record: Record,
    fmt: ChatFormat,
    tok_hash: str,
    max_length: int,
    reasons: Counter[str],
    *,
    truncation: Policy = "right",
    every_turn: bool = False,
) -> SequenceExample:
    """Returns the example of one row; arguments as `sft_examples`.

    `reasons` counts what was cut, but not a row that is lost.

    Raises:
        RowLost: the row gives no example.
    """
    if record.sft_target is None:
        raise RowLost(NO_TARGET)
    encoder = Encoder(record, fmt, tok_hash, every_turn)
    which = "response" if record.response is not None else "chosen"
    example = encoder.sequence(record.messages, which)
    if len(example.input_ids) > max_length:
        example = shorter(encoder, example, which, max_length, truncation, reasons)
    return example


def pair_examples(
    records: Sequence[Record],
    fmt: ChatFormat,
    tok_hash: str,
    max_length: int,
    *,
    truncation: Policy = "drop",
) -> tuple[list[PairExample], Counter[str]]:
    """Returns (pairs, reasons of rows dropped); arguments as `sft_examples`.

    A pair with an answer past `max_length` is dropped unless another policy is asked for; cut on
    the right, its score is one of another answer. Prompts are cut alike for both answers. A pair
    whose answers come to the same ids is dropped.
    """
    return _each(
        lambda record, reasons: pair_example(
            record, fmt, tok_hash, max_length, reasons, truncation=truncation
        ),
        records,
    )


def pair_example(
    record: Record,
    fmt: ChatFormat,
    tok_hash: str,
    max_length: int,
    reasons: Counter[str],
    *,
    truncation: Policy = "drop",
) -> PairExample:
    """Returns the pair of one row; see `sft_example`."""
    if record.chosen is None or record.rejected is None:
        raise RowLost(NO_PAIR)
    encoder = Encoder(record, fmt, tok_hash)
    pair = encoder.pair(record.messages)
    if pair[0].input_ids == pair[1].input_ids:
        raise RowLost(IDENTICAL)
    if longest(pair) > max_length:
        pair = shorter_pair(encoder, pair, max_length, truncation, reasons)
    return PairExample(record.uid, *pair, record.margin or 0.0)


def prompt_examples(
    records: Sequence[Record],
    fmt: ChatFormat,
    tok_hash: str,
    max_prompt_length: int,
    *,
    truncation: Policy = "drop",
) -> tuple[list[PromptExample], Counter[str]]:
    """Returns (prompts, reasons of rows dropped); arguments as `sft_examples`.

    Prompts are the ids that `ChatFormat.encode` puts before an answer. Longer ones than
    `max_prompt_length` tokens are dropped unless another policy is asked for. Repeated prompts
    are kept.
    """
    return _each(
        lambda record, reasons: prompt_example(
            record, fmt, tok_hash, max_prompt_length, reasons, truncation=truncation
        ),
        records,
    )


def prompt_example(
    record: Record,
    fmt: ChatFormat,
    tok_hash: str,
    max_prompt_length: int,
    reasons: Counter[str],
    *,
    truncation: Policy = "drop",
) -> PromptExample:
    """Returns the prompt of one row; see `sft_example`."""
    encoder = Encoder(record, fmt, tok_hash)
    prompt = encoder.prompt(record.messages)
    if len(prompt.input_ids) > max_prompt_length:
        prompt = shorter_prompt(encoder, prompt, max_prompt_length, truncation, reasons)
    return prompt


def _each(
    make: Callable[[Record, Counter[str]], Example], records: Iterable[Record]
) -> tuple[list[Example], Counter[str]]:
    examples: list[Example] = []
    reasons: Counter[str] = Counter()
    for record in records:
        try:
            examples.append(make(record, reasons))
        except RowLost as lost:
            reasons[lost.reason] += 1
    return examples, reasons
