"""What a source sees of an answer that reads text and not the actor's ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from data_sources.examples import PromptExample


@dataclass(frozen=True)
class TextAnswers:
    """Answers of one batch, as text.

    Attributes:
        prompts: the rows' prompts; `text` is what the actor continued.
        responses: the rows' answers without special tokens.
    """

    prompts: Sequence[PromptExample]
    responses: list[str]

    @property
    def prompt_texts(self) -> list[str]:
        """What the actor continued, row by row."""
        return [prompt.text for prompt in self.prompts]


class TextSource(Protocol):
    """Gives each answer a raw score."""

    def __call__(self, answers: TextAnswers) -> torch.Tensor | list[float]:
        """One raw score an answer, as numbers or as an fp32 tensor on the training device.

        Raises:
            ConfigError: there is no usable score; one line that names the source.
        """
