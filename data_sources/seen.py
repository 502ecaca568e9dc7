"""One record as its stage sees it: token ids, and which of them carry loss or are scored."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from data_sources.examples import (
    SequenceExample,
    pair_examples,
    prompt_examples,
    sft_examples,
    target_spans,
)
from data_sources.records import Record
from data_sources.truncation import Policy
from rlhf_app.config.schema import RunConfig, StageName
from rlhf_app.models.chat_format import ChatFormat

UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class SeenText:
    """A text as ids.

    Attributes:
        label: prompt, answer, chosen or rejected.
        ids: prompt and answer.
        prompt_tokens: how many of them are the prompt.
        marked: spans that carry loss (SFT), or are the answer that is scored (reward).
    """

    label: str
    ids: list[int]
    prompt_tokens: int
    marked: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StageView:
    """How one stage of one run turns records into ids.

    Attributes:
        config: the run.
        stage: whose view.
        fmt, tok_hash: of the model in training.
        max_length: most tokens of prompt and answer in SFT and the reward model.
    """

    config: RunConfig
    stage: StageName
    fmt: ChatFormat
    tok_hash: str
    max_length: int

    @property
    def limit(self) -> int:
        """Most tokens of a row of this stage: of its prompt for PPO."""
        return self.config.ppo.max_prompt_length if self.stage == "ppo" else self.max_length

    @property
    def truncation(self) -> Policy:
        """What becomes of longer rows."""
        policy: Policy = getattr(self.config.data.truncation, self.stage)
        return policy

    def of(self, record: Record) -> tuple[list[SeenText], Counter[str]]:
        """Returns (texts as the stage gets them, reasons of what was left out or cut)."""
        return self._encode(record, self.limit)

    def whole(self, record: Record) -> list[SeenText]:
        """Returns the texts without a limit; none where they cannot be encoded."""
        return self._encode(record, UNLIMITED)[0]

    def _encode(self, record: Record, limit: int) -> tuple[list[SeenText], Counter[str]]:
        loss_on = self.config.data.sft_loss_on
        encoding = (self.fmt, self.tok_hash, limit)
        if self.stage == "ppo":
            prompts, reasons = prompt_examples([record], *encoding, truncation=self.truncation)
            return [SeenText("prompt", p.input_ids, len(p.input_ids)) for p in prompts], reasons
        if self.stage == "reward":
            pairs, reasons = pair_examples([record], *encoding, truncation=self.truncation)
            sides = [("chosen", p.chosen) for p in pairs] + [
                ("rejected", p.rejected) for p in pairs
            ]
            return [self._text(label, example) for label, example in sides], reasons
        examples, reasons = sft_examples(
            [record],
            *encoding,
            truncation=self.truncation,
            every_turn=loss_on == "assistant_turns",
        )
        return [self._text("answer", example) for example in examples], reasons

    def _text(self, label: str, example: SequenceExample) -> SeenText:
        start, length = example.response_start, len(example.input_ids)
        if self.stage == "sft":
            marked = tuple(target_spans(example, self.config.data.sft_loss_on))
        else:
            marked = ((start, length),)
        return SeenText(label, example.input_ids, start, marked)
