"""Rows that are there twice: as a whole, or with their prompt alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from data_sources.identity import prompt_key
from data_sources.records import Record


@dataclass(slots=True)
class Duplicates:
    """Counts of repeated records; keeps one 64-bit hash for each different one, and prompt.

    Attributes:
        exact: records equal to an earlier one in all their texts.
        same_prompt: other records whose prompt an earlier one has, but for case and spacing.
    """

    exact: int = 0
    same_prompt: int = 0
    _uids: set[int] = field(default_factory=set)
    _prompts: set[int] = field(default_factory=set)

    def add(self, record: Record) -> None:
        """Counts one record."""
        uid, prompt = int(record.uid, 16), int(prompt_key(record.messages), 16)
        if uid in self._uids:
            self.exact += 1
        elif prompt in self._prompts:
            self.same_prompt += 1
        self._uids.add(uid)
        self._prompts.add(prompt)

    @property
    def prompts(self) -> int:
        """Number of different prompts."""
        return len(self._prompts)
