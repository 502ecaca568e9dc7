"""The canonical record: what every raw row becomes before anything else happens to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids sampled by a model, used in place of the text by stages with the same tokenizer.

    Attributes:
        tokenizer: hash of the tokenizer that the ids belong to (`tokenizer_hash`).
        prompt, response, chosen, rejected: ids, empty where the record has no such text.
    """

    tokenizer: str
    prompt: tuple[int, ...] = ()
    response: tuple[int, ...] = ()
    chosen: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """One canonical example.

    Attributes:
        messages: the prompt's turns. A record with `rendered=True` has exactly one, whose
            content is the final prompt text: no chat format is applied to it.
        response: the answer to imitate (SFT), or None.
        chosen, rejected: a preference pair, or None each.
        margin: how much better chosen is, in the data's own units, or None.
        rendered: the prompt is plain text to be continued as it stands.
        source: the name of the data source.
        uid: stable id: hash of source-independent content.
        ids: sampled token ids, or None.
    """

    messages: tuple[Message, ...]
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    margin: float | None = None
    rendered: bool = False
    source: str = ""
    uid: str = ""
    ids: TokenIds | None = None

    @property
    def sft_target(self) -> str | None:
        """The answer that SFT imitates: the response, else the chosen answer."""
        return self.response if self.response is not None else self.chosen

    @property
    def is_pair(self) -> bool:
        """Whether the record can train a reward model."""
        return self.chosen is not None and self.rejected is not None
