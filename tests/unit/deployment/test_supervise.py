"""Ending of workers while the controller itself lives on."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import pytest
from rich.console import Console

from rlhf_app.deployment.failures import WorkerError, write_error
from rlhf_app.deployment.supervise import _Control, run_workers
from rlhf_app.errors import StageFailed
from rlhf_app.run_directory import RunDirectory


def run(path: Path, code: str) -> None:
    directory = RunDirectory(path)
    directory.stage("sft").mkdir()
    argv = [sys.executable, "-c", code]
    run_workers(argv, os.environ, directory, "sft", 1, Console(file=io.StringIO()))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_the_worker_first(tmp_path: Path, signum: signal.Signals) -> None:
    pid_file = tmp_path / "pid"

    def interrupt(number: int, frame: FrameType | None) -> None:
        if pid_file.is_file() and pid_file.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.kill(os.getpid(), signum)

    before = signal.signal(signal.SIGALRM, interrupt), signal.getsignal(signal.SIGTERM)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(
                tmp_path,
                "import os, time; from pathlib import Path; "
                f"Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)",
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before[0])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert signal.getsignal(signal.SIGTERM) == before[1]


def test_warnings_of_the_worker_reach_the_terminal(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.stage("sft").mkdir()
    code = (
        f"open({str(directory.warnings('sft'))!r}, 'w').write('one [slow] path\\n'); "
        f"open({str(directory.result('sft'))!r}, 'w').write('{{}}')"
    )
    shown = io.StringIO()
    argv = [sys.executable, "-c", code]
    run_workers(argv, os.environ, directory, "sft", 1, Console(file=shown, width=100))
    assert "sft: warning: one [slow] path" in shown.getvalue()


def test_a_worker_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"sft: exit code 7; nothing was logged \(log: .*rank0"):
        run(tmp_path, "raise SystemExit(7)")


LAUNCHER_LOG = """
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : here
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 77)
  error_file: <N/A>
"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (None, "sft: rank 1 was killed by SIGKILL .*out-of-memory killer.*rank1.log"),
        ("[gloo/pair.cc] Connection closed by peer", "sft: rank 1 was killed by SIGKILL"),
        ("the numbers do not add up", "sft: rank 0 failed: RuntimeError: the numbers"),
    ],
)
def test_complaint_dse380_dsc30_a_killed_rank_is_named_before_the_peers_it_left(
    tmp_path: Path, message: str | None, expected: str
) -> None:
    directory = RunDirectory(tmp_path)
    directory.logs("sft").mkdir(parents=True)
    directory.launcher_log("sft").write_text(LAUNCHER_LOG)
    if message is not None:
        error = WorkerError.from_exception(RuntimeError(message))
        write_error(directory.error("sft", 0), error)
    argv = [sys.executable, "-c", "raise SystemExit(1)"]
    with pytest.raises(StageFailed, match=expected):
        run_workers(argv, os.environ, directory, "sft", 2, Console(file=io.StringIO()))


def test_success_needs_a_result(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="ended without a result"):
        run(tmp_path, "pass")


def test_a_record_written_at_the_very_end_is_shown(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.stage("sft").mkdir()
    line = '{"step": 3, "total_steps": 3, "time": 9e9, "kind": "train", "loss": 0.5}'
    code = (
        "from pathlib import Path; "
        f"Path({str(directory.metrics('sft'))!r}).write_text({line + chr(10)!r}); "
        f"Path({str(directory.result('sft'))!r}).write_text('{{}}')"
    )
    out = io.StringIO()
    run_workers([sys.executable, "-c", code], os.environ, directory, "sft", 1, Console(file=out))
    assert out.getvalue() == "sft: step 3/3  loss 0.5000\n"


def test_a_wish_to_stop_is_not_forgotten_for_a_checkpoint(tmp_path: Path) -> None:
    noted = [signal.SIGINT, signal.SIGUSR1]
    control = _Control(tmp_path / "request", Console(file=io.StringIO()), noted)
    control.act(training=True)
    assert (tmp_path / "request").read_text() == "STOP\n"
    assert control.asked_to_stop
    noted.append(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        control.act(training=True)


def test_before_training_there_is_nothing_to_save(tmp_path: Path) -> None:
    control = _Control(tmp_path / "request", Console(file=io.StringIO()), [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        control.act(training=False)
    assert not (tmp_path / "request").exists()
