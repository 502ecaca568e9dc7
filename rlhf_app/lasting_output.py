"""Output that nobody may be reading any more: a run outlives the terminal that it was started from.

Ctrl-C also ends the `tee` behind a pipe, and a terminal can be closed: writing fails then, and
that must not be the end of the run, least of all while it is about to save itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LastingOutput:
    """A text stream whose writing never fails: once it has, the rest goes nowhere.

    Args:
        stream: where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        try:
            self._stream.write(text)
        except OSError:
            self._give_up()
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """What is still in the buffer must not fail when Python ends, either."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Standard output and error cannot fail inside."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = LastingOutput(before[0]), LastingOutput(before[1])
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
