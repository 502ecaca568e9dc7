"""What ranks settle before a call in which they need each other.

Where a rollout gathers weights from all ranks, or shares its rows with them, a rank that goes
another way, or raises, leaves the others in a collective that never ends. So each says first
what it has found, and all do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as torch_dist

from rlhf_app.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Terms:
    """What one rank brings to a call, or what holds for all that take part.

    Attributes:
        reasons: why the call needs transformers' generate, in words, without repetition.
        longest: tokens of the longest row, its answer included.
        prompts: how many.
    """

    reasons: tuple[str, ...] = ()
    longest: int = 0
    prompts: int = 0


class Agreement:
    """The ranks that have to take the same way through a call.

    Args:
        group: a process group of torch.distributed.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def settle(self, mine: Terms, error: Exception | None = None) -> Terms:
        """The terms of all ranks; every rank calls this at the same point.

        Args:
            mine: of this rank.
            error: why this rank cannot go on, or None.

        Raises:
            Exception: `error`, or on the other ranks one of the same kind that names it.
        """
        everyone = self._all((mine, _portable(error)))
        self._raise(error, [other for _, other in everyone], "on rank {rank}: {text}")
        terms: list[Terms] = [other for other, _ in everyone]
        return Terms(
            tuple(dict.fromkeys(reason for other in terms for reason in other.reasons)),
            max(other.longest for other in terms),
            sum(other.prompts for other in terms),
        )

    def end(self, error: Exception | None) -> None:
        """End a rollout on every rank in the middle; every rank calls this at the same point.

        Args:
            error: what this rank has failed with, or None.

        Raises:
            Exception: `error`, or on the other ranks a RuntimeError that names it.
        """
        text = None if error is None else f"{type(error).__name__}: {error}"
        found = [None if other is None else (RuntimeError, other) for other in self._all(text)]
        self._raise(error, found, "rank {rank} failed in this rollout: {text}")

    def _raise(
        self,
        error: Exception | None,
        found: Sequence[tuple[type[Exception], str] | None],
        words: str,
    ) -> None:
        if error is not None:
            raise error
        for index, other in enumerate(found):
            if other is not None:
                kind, text = other
                rank = torch_dist.get_global_rank(self._group, index)
                raise kind(words.format(rank=rank, text=text))

    def _all(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * torch_dist.get_world_size(self._group)
        torch_dist.all_gather_object(items, item, group=self._group)
        return items


def _portable(error: Exception | None) -> tuple[type[Exception], str] | None:
    """An error's kind and text: the object itself may hold what cannot be sent."""
    if error is None:
        return None
    if isinstance(error, ConfigError):
        return ConfigError, str(error)
    named = str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
    return RuntimeError, named
