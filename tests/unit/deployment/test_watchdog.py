"""A run in which nobody moves is noticed, and who holds it up is named."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_app.deployment import watchdog
from rlhf_app.deployment.watchdog import Watchdog, read_beats
from rlhf_app.training.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(watchdog, "_DUMP_SECONDS", 0.0)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ignores the wish for its stacks."""
    code = "import signal, time; signal.signal(signal.SIGUSR2, signal.SIG_IGN); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code])
    yield process
    process.kill()
    process.wait()


def beat(directory: Path, rank: int, pid: int, ago: float, *, watched: bool = True) -> None:
    values = {
        "pid": pid,
        "host": socket.gethostname(),
        "watched": watched,
        "doing": "rollout",
        "time": time.time() - ago,
    }
    directory.mkdir(exist_ok=True)
    (directory / f"rank{rank}").write_text(json.dumps(values))


def test_silence_of_all_is_a_complaint_and_a_stopped_process_its_cause(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    time.sleep(0.3)
    sleeper.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    beat(tmp_path, 1, sleeper.pid, 130)
    beat(tmp_path, 0, 2**22 + 1, 125)  # no such process
    assert Watchdog(tmp_path, 3).complaint() is None
    assert Watchdog(tmp_path, None).complaint() is None
    complaint = Watchdog(tmp_path, 2).complaint()
    assert complaint is not None
    assert "no worker has moved for 2.1 minutes" in complaint
    assert "rank 0 is gone and rank 1 is stopped" in complaint
    assert "(phase: rollout)" in complaint
    assert "deployment.hang_minutes" in complaint


def test_one_that_moves_is_enough(tmp_path: Path) -> None:
    beat(tmp_path, 0, 2**22 + 1, 500)
    beat(tmp_path, 1, 2**22 + 2, 1)
    assert Watchdog(tmp_path, 2).complaint() is None


def test_before_training_nobody_is_watched(tmp_path: Path) -> None:
    assert Watchdog(tmp_path / "none", 1).complaint() is None
    beat(tmp_path, 0, 2**22 + 1, 500, watched=False)
    beat(tmp_path, 1, 2**22 + 2, 500)
    assert Watchdog(tmp_path, 2).complaint() is None


def test_a_worker_writes_over_what_it_said(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beats" / "rank3")
    heartbeat.beat("a phase with a very long name")
    heartbeat.watch()
    heartbeat.beat("_step")
    (found,) = read_beats(tmp_path / "beats")
    assert (found.rank, found.pid, found.doing, found.watched) == (3, os.getpid(), "step", True)
    assert abs(found.time - time.time()) < 5
