"""Rows of the text that PPO mixes in: token ids, and which of them carry loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_sources.encoder import RowLost
from data_sources.encodings import Encoding, pack_spans, unpack_spans
from data_sources.examples import NO_TARGET, LossOn, sft_example, target_spans
from data_sources.records import Record
from data_sources.truncation import Span

TextRow = tuple[list[int], list[Span]]
EMPTY_TEXT = "empty text"


@dataclass(frozen=True)
class TextEncoding(Encoding[TextRow]):
    """Records with an answer, which carries the loss, or of plain text, all of which does.

    Plain text is cut into rows of `limit` tokens, the last one of a row being the first of the
    next, with an EOS token at the end. Rows without a token that carries loss are left out.

    Attributes:
        loss_on: which tokens of records with an answer carry loss.
        eos_id: of the tokenizer, where it has one.
    """

    name = "text"
    loss_on: LossOn = "response"
    eos_id: int | None = None

    def check(self) -> None:
        """See `Encoding`."""
        if self.loss_on == "assistant_turns":
            self.fmt.check_turns()

    def examples(self, record: Record, reasons: Counter[str]) -> list[TextRow]:
        """See `Encoding`."""
        if record.sft_target is None:
            return self._plain(record)
        example = sft_example(
            record,
            self.fmt,
            self.tok_hash,
            self.limit,
            reasons,
            truncation=self.truncation,
            every_turn=self.loss_on == "assistant_turns",
        )
        spans = target_spans(example, self.loss_on)
        return [(example.input_ids, spans)] if spans else []

    def _plain(self, record: Record) -> list[TextRow]:
        if len(record.messages) != 1:
            raise RowLost(NO_TARGET)
        if not record.messages[0].content.strip():
            raise RowLost(EMPTY_TEXT)
        ids = self.fmt.prompt_ids([("user", record.messages[0].content)], rendered=True)
        if self.eos_id is not None:
            ids = [*ids, self.eos_id]
        # The first token of a row is never predicted: each row begins with the last one of the
        # row before, so that every other token is predicted once.
        parts = [ids[at : at + self.limit] for at in range(0, len(ids) - 1, self.limit - 1)]
        return [(part, [(1, len(part))]) for part in parts]

    def rows(self, example: TextRow) -> Sequence[Sequence[int]]:
        """See `Encoding`."""
        return [example[0]]

    def targets(self, example: TextRow) -> int:
        """See `Encoding`."""
        return sum(end - start for start, end in example[1])

    def pack(self, example: TextRow) -> list[int]:
        """See `Encoding`."""
        return [*pack_spans(example[1]), *example[0]]

    def unpack(self, packed: list[int], uid: str, margin: float) -> TextRow:
        """See `Encoding`."""
        spans, ids = unpack_spans(packed)
        return ids, list(spans)

    def facts(self) -> dict[str, Any]:
        """See `Encoding`."""
        return super().facts() | {"loss_on": self.loss_on, "eos": self.eos_id}
