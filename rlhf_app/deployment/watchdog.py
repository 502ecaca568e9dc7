"""Ends a run in which no worker has moved for too long, and says who held it up."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_app.training.heartbeat import DUMP_SIGNAL

_LOOK_SECONDS = 1.0
_DUMP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Beat:
    """What one worker said last.

    Attributes:
        rank: whose.
        pid: its process, on `host`.
        host: its machine.
        doing: the phase it was in.
        time: when, in seconds since the epoch.
        watched: whether it has begun to train.
    """

    rank: int
    pid: int
    host: str
    doing: str
    time: float
    watched: bool


class Watchdog:
    """Looks at the workers of one stage.

    Args:
        directory: of their heartbeats, `rank<r>`.
        minutes: of silence that are too long; None never complains.
    """

    def __init__(self, directory: Path, minutes: float | None) -> None:
        self._directory = directory
        self._minutes = minutes
        self._looked = 0.0

    def complaint(self) -> str | None:
        """What is wrong, or None. Where something is, stacks have been written to the logs."""
        now = time.monotonic()
        if self._minutes is None or now - self._looked < _LOOK_SECONDS:
            return None
        self._looked = now
        beats = read_beats(self._directory)
        if not beats or not all(beat.watched for beat in beats):
            return None
        silent = time.time() - max(beat.time for beat in beats)
        if silent < self._minutes * 60:
            return None
        held_up = [(beat, how) for beat in beats if (how := _trouble(beat))]
        _dump_stacks(beats)
        if not held_up:
            first = min(beats, key=lambda beat: beat.time)
            held_up = [(first, "was the first to fall silent")]
        who = " and ".join(f"rank {beat.rank} {how}" for beat, how in held_up)
        return (
            f"no worker has moved for {silent / 60:.1f} minutes: {who} "
            f"(phase: {held_up[0][0].doing}). Where each of them is, is in its log; if a phase may "
            "take that long, raise deployment.hang_minutes"
        )


def read_beats(directory: Path) -> list[Beat]:
    """What the workers said last, by rank; one that is being written is left out."""
    found = []
    for path in sorted(directory.glob("rank*"), key=lambda path: int(path.name[4:])):
        with contextlib.suppress(OSError, ValueError):
            found.append(Beat(rank=int(path.name[4:]), **json.loads(path.read_bytes())))
    return found


def _trouble(beat: Beat) -> str | None:
    """What is visibly wrong with a process of this machine."""
    if beat.host != socket.gethostname() or not Path("/proc").is_dir():
        return None
    try:
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "is gone"
    return {
        "T": "is stopped (by SIGSTOP or a debugger)",
        "t": "is stopped by a debugger",
        "Z": "is dead",
        "D": "waits for a disk or a driver",
    }.get(state)


def _dump_stacks(beats: list[Beat]) -> None:
    here = socket.gethostname()
    for beat in beats:
        if beat.host == here:
            with contextlib.suppress(OSError):
                os.kill(beat.pid, DUMP_SIGNAL)
    time.sleep(_DUMP_SECONDS)
