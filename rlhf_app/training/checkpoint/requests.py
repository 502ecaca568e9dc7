"""What a running stage is asked for from outside: a checkpoint, or a checkpoint and the end.

The controller leaves a file in the stage's directory, which reaches ranks behind torchrun and on
other machines alike. Workers hear signals as well, for those who start them by hand and for
schedulers that signal every process of a job: SIGUSR1 for a checkpoint, SIGTERM for a checkpoint
and the end. Both are taken up between two steps, by all ranks together.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import FrameType

from rlhf_app.training.files import atomic_write_text


class Request(IntEnum):
    """The larger asks for more."""

    NOTHING = 0
    CHECKPOINT = 1
    STOP = 2


_SIGNALS = {signal.SIGUSR1: Request.CHECKPOINT, signal.SIGTERM: Request.STOP}


def ask(path: Path, request: Request) -> None:
    """Leave a request where the workers of a stage look for one."""
    atomic_write_text(path, request.name + "\n")


class Requests:
    """The requests to this process.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signalled = Request.NOTHING

    def take(self) -> Request:
        """What was asked since the last call; it is not asked twice."""
        asked, self._signalled = self._signalled, Request.NOTHING
        with contextlib.suppress(FileNotFoundError):
            # Taken before it is read: one that comes in between is another file, for the next call.
            taken = self._path.replace(self._path.with_name(f"{self._path.name}.taken"))
            asked = max(asked, Request[taken.read_text(encoding="utf-8").strip()])
            taken.unlink()
        return asked

    def listen(self) -> None:
        """From now on signals to this process are requests; before, they end it at once."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = max(self._signalled, _SIGNALS[signal.Signals(number)])


@contextlib.contextmanager
def own_handlers() -> Iterator[None]:
    """What listens to signals inside does so no longer afterwards."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
