"""No worker outlives its controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_app.deployment.child_process import start, stop

# A worker that ignores polite requests and has a child of its own.
_STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""

# A controller that starts a worker and waits.
_CONTROLLER = """
import os, sys, time
from pathlib import Path
from rlhf_app.deployment.child_process import start
process = start([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, Path("log"))
print(process.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def read_pid(log: Path) -> int:
    deadline = time.monotonic() + 20
    while not (log.is_file() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline, "the process did not start"
        time.sleep(0.02)
    return int(log.read_text())


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_stop_ends_the_whole_group_even_if_it_resists(tmp_path: Path) -> None:
    process = start([sys.executable, "-c", _STUBBORN], os.environ, tmp_path / "log")
    child = read_pid(tmp_path / "log")
    assert alive(child)
    stop(process, grace_seconds=0.3)
    assert process.returncode == -signal.SIGKILL
    assert wait_until_gone(child)


def test_stop_is_harmless_after_the_end(tmp_path: Path) -> None:
    process = start([sys.executable, "-c", "raise SystemExit(5)"], os.environ, tmp_path / "log")
    process.wait()
    stop(process)
    stop(process)
    assert process.returncode == 5


def test_killing_the_controller_ends_the_worker(tmp_path: Path, repo_root: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-c", _CONTROLLER],
        cwd=tmp_path,
        env=dict(os.environ) | {"PYTHONPATH": str(repo_root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    worker = int(controller.stdout.readline())
    assert alive(worker)
    controller.kill()
    controller.wait()
    controller.stdout.close()
    assert wait_until_gone(worker)
