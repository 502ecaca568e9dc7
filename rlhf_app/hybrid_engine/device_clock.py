"""Seconds that a device spends on some part of its work, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DeviceClock:
    """Adds up the time of what is queued inside `running`.

    Args:
        device: that does the work; the host's own time where it is the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the work to be counted."""
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._spans.append((begin, end))

    def seconds(self) -> float:
        """The sum; on CUDA it waits for the last of the work."""
        for begin, end in self._spans:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._spans.clear()
        return self._seconds
