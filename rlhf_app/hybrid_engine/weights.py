"""Where a rollout's weights are: in the module, or gathered from ZeRO-3's shards for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Weights(Protocol):
    """Makes the module's weights usable by forwards outside training.

    Attributes:
        lockstep: every rank runs as many forwards as the busiest one, one at a time, because a
            forward itself communicates.
        settled: addresses stay the same from one rollout to the next.
    """

    lockstep: bool
    settled: bool

    def available(self) -> AbstractContextManager[None]:
        """Context in which whole weights can be computed with; nests."""
        ...

    def any_working(self, working: bool) -> bool:
        """Whether any rank still has work; asked by every rank before every forward."""
        ...

    def idle_forward(self) -> None:
        """Take part in the communication of one forward of the others."""
        ...


class ResidentWeights:
    """Whole weights on every rank, always: ZeRO 0, 1 and 2, and plain modules."""

    lockstep = False
    settled = True

    @contextmanager
    def available(self) -> Iterator[None]:
        """Nothing to do."""
        yield

    def any_working(self, working: bool) -> bool:
        """This rank's own answer: ranks do not wait for each other."""
        return working

    def idle_forward(self) -> None:
        """Never needed."""
