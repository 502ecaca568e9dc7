"""A worker says on disk what it is doing, so that the controller sees when none moves any more.

One small file a rank, written over in place: a few microseconds each time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

#: Asks a worker where it is: the stacks of all its threads go to its log.
DUMP_SIGNAL = signal.SIGUSR2
_LENGTH = 400


class Heartbeat:
    """The file of this process.

    Args:
        path: is created, its directory too.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._watched = False
        self._host = socket.gethostname()

    def watch(self) -> None:
        """From now on phases are short enough for a long silence to mean something."""
        self._watched = True
        self.beat("training")

    def beat(self, doing: str) -> None:
        """Note that something else begins."""
        values = {
            "pid": os.getpid(),
            "host": self._host,
            "watched": self._watched,
            "doing": doing.strip("_")[:100],
            "time": time.time(),
        }
        os.pwrite(self._file, json.dumps(values).ljust(_LENGTH).encode(), 0)


_heartbeat: Heartbeat | None = None


def start(path: Path) -> None:
    """Begin to write this process's file, and to answer `DUMP_SIGNAL`."""
    global _heartbeat
    _heartbeat = Heartbeat(path)
    faulthandler.register(DUMP_SIGNAL, file=sys.stderr, all_threads=True)


def beat(doing: str) -> None:
    """Note what this process is about to do; nothing in a process without a file."""
    if _heartbeat is not None:
        _heartbeat.beat(doing)


def watch() -> None:
    """Training begins; see `Heartbeat.watch`."""
    if _heartbeat is not None:
        _heartbeat.watch()
