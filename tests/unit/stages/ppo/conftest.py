"""Process groups of one, ranks as threads of one process, and the models of test_collect.py.

Threads are enough for code that only adds numbers over ranks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from types import ModuleType
from typing import Any

import pytest
import torch

from rlhf_app.training.distributed import Dist, close, setup


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


@pytest.fixture
def dist() -> Iterator[Dist]:
    """A process group of this process alone."""
    yield setup()
    close()


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    """test_collect.py: it builds four small models and rolls them out."""
    path = Path(__file__).with_name("test_collect.py")
    specification = importlib.util.spec_from_file_location("collect_cases", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
