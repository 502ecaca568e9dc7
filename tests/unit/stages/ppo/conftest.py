"""Ranks as threads of one process: enough for code that only adds numbers over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch

from rlhf_app.training.distributed import Dist


@dataclass(frozen=True)
class ThreadDist(Dist):
    """A place among threads that share `slots`."""

    barrier: Barrier = field(default_factory=lambda: Barrier(1))
    slots: list[Any] = field(default_factory=lambda: [None])

    def gather_objects(self, value: Any) -> list[Any]:
        self.slots[self.rank] = value
        self.barrier.wait(timeout=20)
        found = list(self.slots)
        self.barrier.wait(timeout=20)
        return found

    def sum(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self.gather_objects(values), strict=True)]


@pytest.fixture
def on_ranks() -> Callable[[int, Callable[[Dist], Any]], list[Any]]:
    """What a function returns on each of so many ranks."""

    def start(count: int, run: Callable[[Dist], Any]) -> list[Any]:
        shared = Barrier(count), [None] * count
        places = [
            ThreadDist(rank, rank, count, torch.device("cpu"), *shared) for rank in range(count)
        ]
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(run, places))

    return start
