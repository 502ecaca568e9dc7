"""A Hub that does not answer, as local servers play it: bounded, and the cache is used."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from data_sources.hub import hub_rows
from rlhf_app.errors import ConfigError
from rlhf_app.models import hub_reach
from rlhf_app.models.load import load_config
from rlhf_app.models.tokenizer import load_tokenizer

PATIENCE = 0.3


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    """A process that knows nothing of the Hub yet, with an empty cache."""
    import datasets

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_reach, "PATIENCE_SECONDS", PATIENCE)
    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "")
    hub_reach._answers.cache_clear()
    yield
    hub_reach._answers.cache_clear()


@pytest.fixture(params=["refuses", "swallows"])
def unreachable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Nobody listens, or nobody ever answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "swallows":
            listener.listen(50)
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        yield endpoint


def test_what_is_not_in_the_cache_is_one_line_soon(unreachable, caplog):
    import datasets

    began = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError) as caught:
        load_tokenizer("someone/no-such-model")
    assert "the Hugging Face Hub cannot be reached" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"model\.actor someone/no-such-model"):
        load_config("someone/no-such-model")
    with pytest.raises(ConfigError, match=r"data source someone/data: no such file .* reached"):
        list(hub_rows("someone/data", None, evaluation=False))
    # Two attempts, once for all three, and imports; the client alone takes 25 s for a request.
    assert time.monotonic() - began < 20
    own = [r.getMessage() for r in caplog.records if r.name == hub_reach.__name__]
    assert own == [
        f"the Hugging Face Hub at {unreachable} does not answer: only what is in the local cache "
        "can be used"
    ]
    assert constants.HF_HUB_OFFLINE
    assert datasets.config.HF_HUB_OFFLINE


def test_any_answer_is_one(monkeypatch, caplog):
    asked = []

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(hub_reach, "PATIENCE_SECONDS", 10.0)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    with contextlib.closing(server.socket):
        for _ in range(3):
            hub_reach.use_cache_if_unreachable()
        server.shutdown()
    assert len(asked) == 1
    assert not constants.HF_HUB_OFFLINE
    assert not caplog.records


def test_nobody_is_asked_where_the_user_said_offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_reach, "_asked", lambda _: pytest.fail("asked"))
    hub_reach.use_cache_if_unreachable()


def test_a_name_that_is_never_looked_up_is_left_behind(monkeypatch):
    """No timeout of the client holds for that."""
    released = threading.Event()

    class Stuck:
        def head(self, *_: object, **__: object) -> None:
            released.wait(20)

    monkeypatch.setattr("huggingface_hub.get_session", Stuck)
    began = time.monotonic()
    hub_reach.use_cache_if_unreachable()
    assert time.monotonic() - began < 10
    assert constants.HF_HUB_OFFLINE
    released.set()
