"""The parts of a stage's time have no gaps and start where the command did."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rlhf_app.training import clock as clock_module
from rlhf_app.training.clock import LAUNCHED, StageClock


@pytest.fixture
def now(monkeypatch):
    """Time stands still until it is set."""
    value = [1000.0]
    monkeypatch.setattr(clock_module.time, "time", lambda: value[0])
    return value


def test_parts_add_up_to_the_whole(monkeypatch, now):
    monkeypatch.setenv(LAUNCHED, "990.0")
    clock = StageClock()
    for at, name in (
        (1002.0, "launch"),
        (1003.0, "model"),
        (1010.0, "training"),
        (1011.0, "saving"),
    ):
        now[0] = at
        clock.lap(name)
    now[0] = 1015.0
    clock.lap("training")
    clock.move(6.0, "training", "generation")
    assert clock.result() == {
        "wall_seconds": 25.0,
        "startup_seconds": 13.0,
        "seconds": {
            "launch": 12.0, "model": 1.0, "training": 5.0, "saving": 1.0, "generation": 6.0,
        },
    }  # fmt: skip


def test_by_hand_it_starts_with_the_process(monkeypatch):
    monkeypatch.delenv(LAUNCHED, raising=False)
    clock = StageClock()
    clock.lap("launch")
    wall = clock.result()["wall_seconds"]
    # /proc: field 22 is the start in clock ticks since boot.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    began = boot + ticks / os.sysconf("SC_CLK_TCK")
    assert wall == pytest.approx(time.time() - began, abs=2.0)
