"""The embedded default: a small model and a preference task that the project makes itself.

Prompts ask for a few words about two things. Answers come from a grammar and differ in whether
they keep to the things asked for, in their tone and in their form; `gold` measures all three.
"""

from __future__ import annotations

from data_sources.embedded.gold import gold
from data_sources.embedded.task import EmbeddedTask, find, prepare

__all__ = ["EmbeddedTask", "find", "gold", "prepare"]
