"""A new run waits for the workers of the one before."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rlhf_app.deployment.worker_lock import hold, wait_until_free
from rlhf_app.errors import ConfigError
from rlhf_app.run_directory import RunDirectory


def test_it_waits_for_the_last_worker(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    wait_until_free(run)
    locks = [hold(run), hold(run)]
    with pytest.raises(ConfigError, match="workers of an earlier run are still there"):
        wait_until_free(run, seconds=0.3)
    locks.pop().close()
    threading.Timer(0.4, locks.pop().close).start()
    began = time.monotonic()
    wait_until_free(run, seconds=30)
    assert 0.3 < time.monotonic() - began < 20
