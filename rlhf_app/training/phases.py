"""Seconds of the phases of an iteration, without waiting for the device in between."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_app.training.error_phase import within


class PhaseClock:
    """Adds up the time spent in named phases.

    On CUDA the device's own clock is read by events in its queue, so that a phase has the time
    of its kernels and not that of their launches; elsewhere it is the host's clock.

    Args:
        device: that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Books the time of the body under `name`, added to what is there."""
        if self._cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            with within(name):
                yield
            last.record()
            self._events.append((name, first, last))
        else:
            began = time.perf_counter()
            with within(name):
                yield
            self._seconds[name] += time.perf_counter() - began

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far, in the order of their first use.

        Waits for the device, so it belongs at the end of an iteration.
        """
        for name, first, last in self._events:
            last.synchronize()
            self._seconds[name] += first.elapsed_time(last) / 1000
        self._events.clear()
        return dict(self._seconds)

    def named(self) -> dict[str, float]:
        """`seconds` under the names of the metrics file, `<phase>_seconds`."""
        return {f"{name}_seconds": value for name, value in self.seconds().items()}
