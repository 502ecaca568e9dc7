"""What a running stage is asked for: by a file, or by signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlhf_app.training.checkpoint.requests import Request, Requests, ask, own_handlers


def test_a_file_is_a_request_once(tmp_path: Path) -> None:
    requests = Requests(tmp_path / "request")
    assert requests.take() == Request.NOTHING
    ask(tmp_path / "request", Request.STOP)
    assert requests.take() == Request.STOP
    assert requests.take() == Request.NOTHING


def test_signals_are_requests_and_the_larger_one_counts(tmp_path: Path) -> None:
    requests = Requests(tmp_path / "request")
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    with own_handlers():
        requests.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.take() == Request.CHECKPOINT
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.take() == Request.STOP
        assert requests.take() == Request.NOTHING
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)] == before


def test_an_unknown_request_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "request").write_text("sing\n")
    with pytest.raises(KeyError):
        Requests(tmp_path / "request").take()
