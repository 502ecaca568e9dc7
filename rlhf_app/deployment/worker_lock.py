"""No worker of an earlier run writes into a directory while a new run begins there.

A controller that is killed takes its workers with it, but not in the same instant. Every worker
therefore holds a lock as long as it lives, and a new controller waits until nobody does.
"""

from __future__ import annotations

import fcntl
import time
from typing import TextIO

from rlhf_app.errors import ConfigError
from rlhf_app.run_directory import RunDirectory

_NAME = ".workers.lock"
WAIT_SECONDS = 60.0


def hold(run: RunDirectory) -> TextIO:
    """Take a worker's share of the lock, to be kept until the process ends."""
    file = (run.path / _NAME).open("a")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def wait_until_free(run: RunDirectory, seconds: float = WAIT_SECONDS) -> None:
    """Wait until no worker of another run lives.

    Raises:
        ConfigError: some still do.
    """
    end = time.monotonic() + seconds
    with (run.path / _NAME).open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= end:
                    raise ConfigError(
                        f"--output-dir {run.path}: workers of an earlier run are still there; end "
                        "them (ps ax | grep rlhf_app.commands.worker), or use another --output-dir"
                    ) from None
                time.sleep(0.2)
            else:
                return
