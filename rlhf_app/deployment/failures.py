"""What a failing worker leaves behind, and how the controller reads it."""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_app.config.schema import JobName
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training.files import atomic_write_json
from rlhf_app.url_secrets import without_secrets

# As torchrun writes it: "rank : 1 (local_rank: 1)", then "exitcode : -9 (pid: 7)".
_DEATH = re.compile(r"^\s*rank\s*: (\d+) .*\n\s*exitcode\s*: (-\d+) ", re.MULTILINE)
_LOST_PEER = re.compile(
    r"connection|gloo|nccl|\bpeer\b|socket|tcpstore|broken pipe|DistBackendError|DistNetworkError",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class WorkerError:
    """Why a worker stopped.

    Attributes:
        type: class of the exception.
        message: its text.
        last_line: last line of the traceback, which names type and message.
        traceback: all of it.
        time: seconds since the epoch: the first to fail is the cause, the others follow.
    """

    type: str
    message: str
    last_line: str
    traceback: str
    time: float

    @classmethod
    def from_exception(cls, error: BaseException) -> WorkerError:
        """Describe an exception that was caught, without secrets."""
        text = without_secrets("".join(traceback.format_exception(error)).rstrip())
        name = type(error).__name__
        message = without_secrets(str(error))
        first = message.splitlines()[0] if message else ""
        return cls(name, message, f"{name}: {first}" if first else name, text, time.time())


def write_error(path: Path, error: WorkerError) -> None:
    """Write `error_rank<r>.json`."""
    atomic_write_json(path, asdict(error))


def first_error(
    run: RunDirectory, stage: JobName, world_size: int
) -> tuple[int, WorkerError] | None:
    """The rank that failed first and why, or None when no worker could say."""
    found = []
    for rank in range(world_size):
        path = run.error(stage, rank)
        if path.is_file():
            found.append((rank, WorkerError(**json.loads(path.read_text(encoding="utf-8")))))
    return min(found, key=lambda item: item[1].time, default=None)


def killed_rank(launcher_log: Path) -> tuple[int, int] | None:
    """The rank that torchrun saw die by a signal, and its negative exit code.

    SIGTERM does not count: torchrun sends it to the others once one has failed.
    """
    if not launcher_log.is_file():
        return None
    text = launcher_log.read_text(encoding="utf-8", errors="replace")
    for rank, code in _DEATH.findall(text):
        if -int(code) != signal.SIGTERM:
            return int(rank), int(code)
    return None


def is_lost_peer(error: WorkerError) -> bool:
    """Whether an error only says that another process went away."""
    return _LOST_PEER.search(error.last_line) is not None


_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory?)",
    # A mapped file has no bytes where it had some.
    signal.SIGBUS: " (/dev/shm full, or files in data.cache_dir cut while in use?)",
}


def describe_exit(code: int) -> str:
    """Say how a process ended from `Popen.returncode`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}{_HINTS.get(-code, '')}"


def last_log_line(paths: Iterable[Path]) -> tuple[Path, str] | None:
    """The first of the log files that is not empty, with its last line."""
    for path in paths:
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            for line in reversed(lines):
                if line.strip():
                    return path, line.strip()
    return None
