"""Records to token ids, one function per stage. Every row left out is counted by its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from data_sources.encoder import (
    Encoder,
    LossOn,
    PairExample,
    PromptExample,
    RowLost,
    SequenceExample,
    target_spans,
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
    "pair_examples",
    "prompt_examples",
    "sft_examples",
    "target_spans",
    "turns",
]

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
    examples: list[SequenceExample] = []
    reasons: Counter[str] = Counter()
    if every_turn:
        fmt.check_turns()
    for record in records:
        if record.sft_target is None:
            reasons[NO_TARGET] += 1
            continue
        encoder = Encoder(record, fmt, tok_hash, every_turn)
        which = "response" if record.response is not None else "chosen"
        try:
            example = encoder.sequence(record.messages, which)
            if len(example.input_ids) > max_length:
                example = shorter(encoder, example, which, max_length, truncation, reasons)
        except RowLost as lost:
            reasons[lost.reason] += 1
            continue
        examples.append(example)
    return examples, reasons


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
    examples: list[PairExample] = []
    reasons: Counter[str] = Counter()
    for record in records:
        if record.chosen is None or record.rejected is None:
            reasons[NO_PAIR] += 1
            continue
        encoder = Encoder(record, fmt, tok_hash)
        try:
            pair = encoder.pair(record.messages)
            if pair[0].input_ids == pair[1].input_ids:
                raise RowLost(IDENTICAL)
            if longest(pair) > max_length:
                pair = shorter_pair(encoder, pair, max_length, truncation, reasons)
        except RowLost as lost:
            reasons[lost.reason] += 1
            continue
        examples.append(PairExample(record.uid, *pair, record.margin or 0.0))
    return examples, reasons


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
    examples: list[PromptExample] = []
    reasons: Counter[str] = Counter()
    for record in records:
        encoder = Encoder(record, fmt, tok_hash)
        try:
            prompt = encoder.prompt(record.messages)
            if len(prompt.input_ids) > max_prompt_length:
                prompt = shorter_prompt(encoder, prompt, max_prompt_length, truncation, reasons)
        except RowLost as lost:
            reasons[lost.reason] += 1
            continue
        examples.append(prompt)
    return examples, reasons
