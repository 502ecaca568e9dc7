"""Datasets known by name: their splits, and how rows become records where columns do not tell.

A dataset is found by its exact Hub id, without regard to case; `id:config` is looked for first.
"""

from __future__ import annotations

from collections.abc import Iterable

from data_sources.named.dataset import NamedDataset
from data_sources.named.instructions import INSTRUCTIONS
from data_sources.named.preferences import PREFERENCES
from data_sources.named.questions import QUESTIONS
from data_sources.named.ratings import RATINGS

__all__ = ["NamedDataset", "find", "known"]

_REGISTRY: dict[str, NamedDataset] = {
    name.lower(): dataset
    for group in (PREFERENCES, RATINGS, INSTRUCTIONS, QUESTIONS)
    for name, dataset in group.items()
}


def find(path: str) -> NamedDataset | None:
    """Returns what is known of a source `id` or `id:config`, or None."""
    name = path.strip().lower()
    return _REGISTRY.get(name) or _REGISTRY.get(name.partition(":")[0])


def known() -> Iterable[str]:
    """Returns the ids, in lower case."""
    return sorted(_REGISTRY)
