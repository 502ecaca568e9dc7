"""Which answers have ended: read from the device, without making it wait where that matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Ended(NamedTuple):
    """How one answer ended.

    Attributes:
        tokens: of the answer, its stop token included.
        stopped: whether a stop id ended it.
    """

    tokens: int
    stopped: bool


class _Look(NamedTuple):
    requests: list[int]  # of each row, when it was taken
    flags: torch.Tensor  # [3, S] on the host: tokens, whether the row goes on, whether stopped
    arrived: Any  # a CUDA event, or None


class FinishFlags:
    """Looks at the flags of the active rows, read at once or one look later.

    A late look on CUDA is a copy to pinned memory, queued behind the steps before it: the host
    reads it when the device is already at work on the next steps.

    Args:
        flags: [3, S] int64 view of the state: tokens drawn, alive, stopped.
        late: read each look when the next one is taken.
    """

    def __init__(self, flags: torch.Tensor, late: bool) -> None:
        self._flags = flags
        self._late = late
        self._before: _Look | None = None

    def look(self, requests: Sequence[int]) -> dict[int, Ended]:
        """Take a look.

        Args:
            requests: of the active rows, which are the first ones.

        Returns:
            The answers that have ended, by request: of this look, or if late of the one before.
        """
        if not self._late:
            return _read(_Look(list(requests), self._flags[:, : len(requests)].cpu(), None))
        before, self._before = self._before, self._take(list(requests))
        return {} if before is None else _read(before)

    def last(self) -> dict[int, Ended]:
        """What the last look saw, if it has not been read."""
        before, self._before = self._before, None
        return {} if before is None else _read(before)

    def _take(self, requests: list[int]) -> _Look:
        if self._flags.device.type != "cuda":
            return _Look(requests, self._flags.clone(), None)
        host = torch.empty(self._flags.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(self._flags, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return _Look(requests, host, arrived)


def _read(look: _Look) -> dict[int, Ended]:
    if look.arrived is not None:
        look.arrived.synchronize()
    counts, alive, stopped = look.flags.tolist()
    return {
        request: Ended(counts[row], bool(stopped[row]))
        for row, request in enumerate(look.requests)
        if not alive[row]
    }
