"""What each stage makes of a record, and how it lies in a file of integers.

An encoding can be sent to another process. Packing keeps all of an example but its uid and its
margin, which lie elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from data_sources.encoder import (
    LossOn,
    PairExample,
    PromptExample,
    SequenceExample,
    target_tokens,
)
from data_sources.examples import pair_example, prompt_example, sft_example
from data_sources.records import Record
from data_sources.truncation import Policy, Span
from rlhf_app.models.chat_format import ChatFormat, UnsupportedTurns

E = TypeVar("E")


@dataclass(frozen=True)
class Encoding(ABC, Generic[E]):
    """Records to examples of one stage.

    Attributes:
        name: of the kind of example.
        fmt: chat format of the model in training.
        tok_hash: `tokenizer_hash` of its tokenizer.
        limit: most tokens of a row.
        truncation: what becomes of longer rows.
    """

    name: ClassVar[str]
    fmt: ChatFormat
    tok_hash: str
    limit: int
    truncation: Policy

    def check(self) -> None:
        """Refuses a chat format that cannot tell what is asked for.

        Raises:
            ConfigError: as `ChatFormat.check_turns`.
        """

    @abstractmethod
    def examples(self, record: Record, reasons: Counter[str]) -> Sequence[E]:
        """Returns the examples of one record, mostly one; counts what was cut.

        Raises:
            RowLost: there is none.
        """

    @abstractmethod
    def rows(self, example: E) -> Sequence[Sequence[int]]:
        """Returns the token ids that a model is given."""

    def length(self, example: E) -> int:
        """Tokens that the example costs in a batch: all its rows are as long as the longest."""
        rows = self.rows(example)
        return len(rows) * max(map(len, rows))

    def targets(self, example: E) -> int:
        """Tokens that carry loss, where the loss is one of tokens."""
        return 0

    def margin(self, example: E) -> float:
        """How much better the better answer is, where there are two."""
        return 0.0

    @abstractmethod
    def pack(self, example: E) -> list[int]:
        """Returns the example as integers below 2^31."""

    @abstractmethod
    def unpack(self, packed: list[int], uid: str, margin: float) -> E:
        """Returns what was packed."""

    def completed(self, example: E, records: Sequence[Record], place: int, cut: bool) -> E:
        """Returns an unpacked example with what is not packed.

        Args:
            example: as `unpack` returned it.
            records: all of them; reading one costs something.
            place: of the one that it comes from.
            cut: it was too long, and is not what the record says.
        """
        return example

    def facts(self) -> dict[str, Any]:
        """Everything that decides what a record becomes, the code excepted."""
        return {
            "kind": self.name,
            "tokenizer": self.tok_hash,
            "format": _format_facts(self.fmt),
            "limit": self.limit,
            "truncation": self.truncation,
        }


def _format_facts(fmt: ChatFormat) -> dict[str, Any]:
    tokenizer = fmt.tokenizer
    try:
        # Some templates write today's date.
        probe = fmt.prompt_text([("user", "x")])
    except UnsupportedTurns as error:
        probe = str(error)
    return {
        "kind": fmt.kind,
        "template": tokenizer.chat_template,
        "special_tokens": {name: str(text) for name, text in tokenizer.special_tokens_map.items()},
        "ids": [list(fmt.prefix_ids), list(fmt.stop_ids), fmt.end_id],
        "probe": probe,
    }


def pack_spans(spans: Sequence[Span]) -> list[int]:
    """Returns their number and their ends, to be followed by other integers."""
    return [len(spans), *(place for span in spans for place in span)]


def unpack_spans(packed: list[int]) -> tuple[tuple[Span, ...], list[int]]:
    """Returns (spans, what follows)."""
    end = 1 + 2 * packed[0]
    return tuple(zip(packed[1:end:2], packed[2:end:2], strict=True)), packed[end:]


@dataclass(frozen=True)
class SFTEncoding(Encoding[SequenceExample]):
    """Demonstrations.

    Attributes:
        loss_on: which tokens carry loss.
    """

    name = "sft"
    loss_on: LossOn = "response"

    def check(self) -> None:
        """See `Encoding`."""
        if self.loss_on == "assistant_turns":
            self.fmt.check_turns()

    def examples(self, record: Record, reasons: Counter[str]) -> list[SequenceExample]:
        """See `Encoding`."""
        return [
            sft_example(
                record,
                self.fmt,
                self.tok_hash,
                self.limit,
                reasons,
                truncation=self.truncation,
                every_turn=self.loss_on == "assistant_turns",
            )
        ]

    def rows(self, example: SequenceExample) -> list[list[int]]:
        """See `Encoding`."""
        return [example.input_ids]

    def targets(self, example: SequenceExample) -> int:
        """See `Encoding`."""
        return target_tokens(example, self.loss_on)

    def pack(self, example: SequenceExample) -> list[int]:
        """See `Encoding`."""
        return [
            example.response_start,
            int(example.truncated),
            *pack_spans(example.earlier),
            *example.input_ids,
        ]

    def unpack(self, packed: list[int], uid: str, margin: float) -> SequenceExample:
        """See `Encoding`."""
        earlier, ids = unpack_spans(packed[2:])
        return SequenceExample(uid, ids, packed[0], bool(packed[1]), earlier)

    def facts(self) -> dict[str, Any]:
        """See `Encoding`."""
        return super().facts() | {"loss_on": self.loss_on}


@dataclass(frozen=True)
class PairEncoding(Encoding[PairExample]):
    """Pairs of answers."""

    name = "pairs"

    def examples(self, record: Record, reasons: Counter[str]) -> list[PairExample]:
        """See `Encoding`."""
        arguments = (record, self.fmt, self.tok_hash, self.limit, reasons)
        return [pair_example(*arguments, truncation=self.truncation)]

    def rows(self, example: PairExample) -> list[list[int]]:
        """See `Encoding`."""
        return [example.chosen.input_ids, example.rejected.input_ids]

    def margin(self, example: PairExample) -> float:
        """See `Encoding`."""
        return example.margin

    def pack(self, example: PairExample) -> list[int]:
        """See `Encoding`."""
        sides = (example.chosen, example.rejected)
        head = [n for side in sides for n in (side.response_start, int(side.truncated))]
        chosen, rejected = self.rows(example)
        return [*head, len(chosen), *chosen, *rejected]

    def unpack(self, packed: list[int], uid: str, margin: float) -> PairExample:
        """See `Encoding`."""
        first, first_cut, second, second_cut, size = packed[:5]
        ids = packed[5:]
        return PairExample(
            uid,
            SequenceExample(uid, ids[:size], first, bool(first_cut)),
            SequenceExample(uid, ids[size:], second, bool(second_cut)),
            margin,
        )


@dataclass(frozen=True)
class PromptEncoding(Encoding[PromptExample]):
    """Prompts. Their text is made again from the record, so that no text is stored."""

    name = "prompts"

    def examples(self, record: Record, reasons: Counter[str]) -> list[PromptExample]:
        """See `Encoding`."""
        arguments = (record, self.fmt, self.tok_hash, self.limit, reasons)
        return [prompt_example(*arguments, truncation=self.truncation)]

    def rows(self, example: PromptExample) -> list[list[int]]:
        """See `Encoding`."""
        return [example.input_ids]

    def pack(self, example: PromptExample) -> list[int]:
        """See `Encoding`."""
        return example.input_ids

    def unpack(self, packed: list[int], uid: str, margin: float) -> PromptExample:
        """See `Encoding`."""
        return PromptExample(uid, packed, "", Record(()))

    def completed(
        self, example: PromptExample, records: Sequence[Record], place: int, cut: bool
    ) -> PromptExample:
        """See `Encoding`."""
        record = records[place]
        if cut:
            return self.examples(record, Counter())[0]
        turns = [(message.role, message.content) for message in record.messages]
        text = self.fmt.prompt_text(turns, record.rendered)
        return PromptExample(record.uid, example.input_ids, text, record)
