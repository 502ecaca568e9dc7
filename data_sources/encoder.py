"""One record to token ids: an answer, a pair of them, or a prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from data_sources.records import Message, Record
from rlhf_app.models.chat_format import ChatFormat, TurnsDoNotNest, UnsupportedTurns

LossOn = Literal["response", "all", "assistant_turns"]

EMPTY_IDS = "sampled answer has no token"
REFUSED = "the chat template refuses the turns"
NOT_NESTED = "the chat template rewrites earlier turns"


@dataclass(frozen=True, slots=True)
class SequenceExample:
    """A prompt and an answer.

    Attributes:
        uid: the record's uid.
        input_ids: prompt and answer.
        response_start: index of the answer's first token; loss and score start there.
        truncated: the answer was cut at the length limit, and has no end token for it.
        earlier: spans of the assistant turns before the answer, each with its end token where
            the format has one; only where they carry loss too (`every_turn`).
    """

    uid: str
    input_ids: list[int]
    response_start: int
    truncated: bool
    earlier: tuple[tuple[int, int], ...] = ()


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


def target_spans(example: SequenceExample, loss_on: LossOn) -> list[tuple[int, int]]:
    """Spans of the tokens with loss; the very first token is never predicted.

    Earlier assistant turns have been looked for only where they carry loss.
    """
    first = 1 if loss_on == "all" else example.response_start
    spans = [(first, len(example.input_ids))]
    if loss_on == "assistant_turns":
        spans = [*example.earlier, *spans]
    return [(max(1, start), end) for start, end in spans if end > max(1, start)]


def target_tokens(example: SequenceExample, loss_on: LossOn) -> int:
    """Number of tokens of one row that carry loss."""
    return sum(end - start for start, end in target_spans(example, loss_on))


class RowLost(Exception):
    """A row gives no example."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Encoder:
    """One record to ids; its prompt may be replaced by a shorter one.

    Ids that were sampled with the same tokenizer are taken as they are.
    """

    record: Record
    fmt: ChatFormat
    tok_hash: str
    every_turn: bool = False

    @property
    def is_sampled(self) -> bool:
        """Whether the record has ids that this tokenizer sampled."""
        ids = self.record.ids
        return ids is not None and ids.tokenizer == self.tok_hash and bool(ids.prompt)

    def sequence(self, messages: Sequence[Message], which: str) -> SequenceExample:
        """Encodes the answer `which` (response, chosen or rejected)."""
        record = self.record
        if self.is_sampled:
            assert record.ids is not None
            answer: tuple[int, ...] = getattr(record.ids, which)
            if not answer:
                raise RowLost(EMPTY_IDS)
            # The sampled ids are the truth: they hold an end token if and only if one was sampled.
            prompt = record.ids.prompt
            return SequenceExample(record.uid, [*prompt, *answer], len(prompt), False)
        prompt_turns = turns(replace(record, messages=tuple(messages)))
        asked = {"every_turn": True} if self.every_turn else {}
        try:
            encoded = self.fmt.encode(
                prompt_turns, getattr(record, which), record.rendered, **asked
            )
        except TurnsDoNotNest:
            raise RowLost(NOT_NESTED) from None
        except UnsupportedTurns:
            raise RowLost(REFUSED) from None
        return SequenceExample(
            record.uid, encoded.ids, encoded.response_start, False, encoded.earlier
        )

    def pair(self, messages: Sequence[Message]) -> tuple[SequenceExample, SequenceExample]:
        """Encodes both answers."""
        return self.sequence(messages, "chosen"), self.sequence(messages, "rejected")

    def prompt(self, messages: Sequence[Message]) -> PromptExample:
        """Encodes the prompt alone."""
        record = self.record
        if tuple(messages) != record.messages:
            record = replace(record, messages=tuple(messages))
        try:
            text = self.fmt.prompt_text(turns(record), record.rendered)
            if self.is_sampled:
                assert record.ids is not None
                ids = list(record.ids.prompt)
            else:
                ids = self.fmt.prompt_ids(turns(record), record.rendered)
        except UnsupportedTurns:
            raise RowLost(REFUSED) from None
        return PromptExample(record.uid, ids, text, record)
