"""Starts worker processes and makes sure that none outlives the controller."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

LOG_TO_FILES = "RLHF_LOG_TO_FILES"
_PR_SET_PDEATHSIG = 1
# Ranks that train would stop after the step; whoever calls `stop` wants it now.
_GRACE_SECONDS = 3.0


def die_with_parent(signum: int) -> None:
    """Ask the kernel to signal this process when its parent ends, however that happens.

    Linux only; elsewhere orderly termination has to do.
    """
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, int(signum))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def start(argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, with its output appended to `log`.

    A group of its own keeps the terminal's Ctrl-C away from the workers: the controller
    decides how they end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    _libc()  # loaded before the fork: the child must not take the loader's lock
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - a list of arguments, no shell
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_controller,
        )


def stop(process: subprocess.Popen[bytes], grace_seconds: float = _GRACE_SECONDS) -> None:
    """End a process and its group: politely first, by force after the grace time.

    Under torchrun the workers have groups of their own: torchrun ends them when it is asked
    politely, and when it has to be killed they die with it (`die_with_parent`).
    """
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    # The group can outlive its leader (data loader processes), so it is killed in any case.
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


def _end_with_controller() -> None:
    die_with_parent(signal.SIGTERM)
