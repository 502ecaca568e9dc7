"""Where a rollout's weights are: in the module, or gathered from ZeRO-3's shards for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from rlhf_app.hybrid_engine.agreement import Agreement
from rlhf_app.hybrid_engine.deepspeed_hooks import engine_hooks, suspended


class Weights(Protocol):
    """Makes the module's weights usable by forwards outside training.

    Attributes:
        lockstep: every rank runs as many forwards as the busiest one, one at a time, because a
            forward itself communicates.
        settled: addresses stay the same from one rollout to the next.
        gather_seconds: time spent on making weights whole, since the start.
        gathered_bytes: bytes of weights made whole, since the start.
        agreement: of the ranks that need each other in a rollout; None where each may call
            alone.
    """

    lockstep: bool
    settled: bool

    @property
    def agreement(self) -> Agreement | None: ...  # noqa: D102
    @property
    def gather_seconds(self) -> float: ...  # noqa: D102
    @property
    def gathered_bytes(self) -> int: ...  # noqa: D102

    def available(self) -> AbstractContextManager[None]:
        """Context in which whole weights can be computed with; nests."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Context in which every weight is whole at once: ranks need no lockstep inside."""
        ...

    def uncut(self) -> AbstractContextManager[None]:
        """Context in which `available` gives weights that are not shared out over ranks, for a
        forward that all ranks run alike."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Context of one decode loop: an error inside also ends the other ranks' loops, where
        they would wait for this one and can still be told."""
        ...

    def any_working(self, working: bool) -> bool:
        """Whether any rank still has work; asked by every rank before every forward."""
        ...

    def idle_forward(self) -> None:
        """Take part in the communication of one forward of the others."""
        ...


class ResidentWeights:
    """Whole weights on every rank, always: ZeRO 0, 1 and 2, and plain modules.

    Args:
        engine: the DeepSpeed engine around the module, or None for a plain module.
    """

    lockstep = False
    settled = True
    gather_seconds = 0.0
    gathered_bytes = 0
    agreement = None

    def __init__(self, engine: Any = None) -> None:
        self._engine = engine

    @contextmanager
    def available(self) -> Iterator[None]:
        """Nothing to gather; DeepSpeed's own hooks rest."""
        with suspended([] if self._engine is None else engine_hooks(self._engine)):
            yield

    def whole(self) -> AbstractContextManager[None]:
        """The same as `available`."""
        return self.available()

    def uncut(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def together(self) -> AbstractContextManager[None]:
        """Nothing to do: ranks do not wait for each other."""
        return nullcontext()

    def any_working(self, working: bool) -> bool:
        """This rank's own answer: ranks do not wait for each other."""
        return working

    def idle_forward(self) -> None:
        """Never needed."""
