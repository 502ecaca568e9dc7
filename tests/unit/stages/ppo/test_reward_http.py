"""Rewards from a server of this test: what is sent, what is taken, and every way to fail."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.errors import ConfigError
from stages.ppo.reward_sources.http import HttpReward
from stages.ppo.reward_sources.texts import TextAnswers

ANSWERS = TextAnswers(
    [PromptExample(str(i), [1], f"prompt {i}", Record((Message("user", ""),))) for i in range(2)],
    ["short", "a longer answer \u00e9"],
)
Reply = Callable[[int, BaseHTTPRequestHandler], None]


class Endpoint:
    """A server whose n-th request is answered by `reply(n, handler)`."""

    def __init__(self, reply: Reply) -> None:
        self.seen: list[dict[str, Any]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = dict(self.headers.items())
                endpoint.seen.append(
                    {"path": self.path, "headers": headers, "body": json.loads(body)}
                )
                reply(len(endpoint.seen), self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        self.url = f"http://{self.host}/score"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Reply], Endpoint]]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    started: list[Endpoint] = []

    def start(reply: Reply) -> Endpoint:
        started.append(Endpoint(reply))
        return started[-1]

    yield start
    for endpoint in started:
        endpoint.server.shutdown()
        endpoint.server.server_close()


def send(handler: BaseHTTPRequestHandler, content: Any, status: int = 200) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def ask(url: str, timeout: float = 5.0, retries: int = 0) -> list[float]:
    return HttpReward(url, timeout=timeout, retries=retries, first_wait=0.01)(ANSWERS)


def fails(url: str, **how: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ask(url, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("key", ["scores", "rewards"])
def test_prompts_and_responses_go_out_and_scores_come_back(serve, key):
    """`rewards` is what OpenRLHF's remote reward models answer."""
    endpoint = serve(lambda n, handler: send(handler, {key: [1, -0.25], "extra": "x"}))
    assert ask(endpoint.url + "?model=a") == [1.0, -0.25]
    (seen,) = endpoint.seen
    assert seen["path"] == "/score?model=a"
    assert seen["headers"]["Content-Type"] == "application/json"
    assert seen["body"] == {"prompts": ["prompt 0", "prompt 1"], "responses": ANSWERS.responses}


def test_it_fails_twice_and_then_works(serve):
    statuses = {1: 503, 2: 429}

    def reply(n: int, handler: BaseHTTPRequestHandler) -> None:
        send(handler, {"scores": [1.0, 2.0]} if n == 3 else b"busy", statuses.get(n, 200))

    endpoint = serve(reply)
    assert ask(endpoint.url, retries=2) == [1.0, 2.0]
    assert len(endpoint.seen) == 3


def test_waits_grow_from_retry_to_retry(serve, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    endpoint = serve(lambda n, handler: send(handler, b"", 500))
    url = endpoint.url
    with pytest.raises(ConfigError, match=r"status 500, 8 time\(s\)"):
        HttpReward(url, timeout=5.0, retries=7)(ANSWERS)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_it_never_works(serve):
    endpoint = serve(lambda n, handler: send(handler, b"broken", 500))
    message = fails(endpoint.url, retries=1)
    assert (
        message == f"reward endpoint {endpoint.url}: status 500, 2 time(s); is the server running?"
    )
    assert len(endpoint.seen) == 2


def test_a_wrong_request_is_not_repeated(serve):
    endpoint = serve(lambda n, handler: send(handler, b"no such path", 404))
    message = fails(endpoint.url, retries=5)
    assert message == f"reward endpoint {endpoint.url}: status 404: no such path"
    assert len(endpoint.seen) == 1


def test_it_hangs(serve):
    ended = threading.Event()
    endpoint = serve(lambda n, handler: ended.wait(30))
    began = time.monotonic()
    assert "no answer within 0.2 s, 2 time(s)" in fails(endpoint.url, timeout=0.2, retries=1)
    assert time.monotonic() - began < 3
    ended.set()


def test_it_trickles(serve):
    """Each byte comes in time, the answer as a whole never would."""
    ended = threading.Event()

    def reply(n: int, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        for _ in range(100):
            ended.wait(0.05)
            handler.wfile.write(b" ")
            handler.wfile.flush()

    endpoint = serve(reply)
    began = time.monotonic()
    assert "no answer within 0.3 s" in fails(endpoint.url, timeout=0.3)
    assert time.monotonic() - began < 3
    ended.set()


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (200, True, "no answer within 0.3 s, 1 time(s)"),
        (404, False, ": status 404"),
        (503, False, "status 503, 1 time(s)"),
    ],
)
def test_headers_and_the_text_of_an_error_trickle(serve, status, headers, message):
    ended = threading.Event()

    def reply(n: int, handler: BaseHTTPRequestHandler) -> None:
        first = f"HTTP/1.1 {status} x\r\n" + ("X-Long: " if headers else "\r\n")
        handler.wfile.write(first.encode())
        with contextlib.suppress(OSError):
            while not ended.wait(0.02):
                handler.wfile.write(b"a")
                handler.wfile.flush()

    endpoint = serve(reply)
    began = time.monotonic()
    assert message in fails(endpoint.url, timeout=0.3)
    assert time.monotonic() - began < 1.5
    ended.set()


def test_it_is_not_there(serve):
    endpoint = serve(lambda n, handler: None)
    endpoint.server.shutdown()
    endpoint.server.server_close()
    assert f"reward endpoint {endpoint.url}: connection refused, 2" in fails(
        endpoint.url, retries=1
    )


def test_it_hangs_up(serve):
    endpoint = serve(lambda n, handler: handler.connection.close())
    assert "reward endpoint" in fails(endpoint.url)


def test_a_redirect_is_named_and_not_followed(serve):
    """Followed, the POST would become a GET without a body."""

    def reply(n: int, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "https://elsewhere/score?key=hidden")
        handler.end_headers()

    message = fails(serve(reply).url, retries=3)
    assert "status 302; it redirects to https://elsewhere/score?***" in message


def test_a_redirect_on_the_same_host_shows_no_query_either(serve):
    def reply(n: int, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", "/other?key=hidden")
        handler.end_headers()

    endpoint = serve(reply)
    assert f"it redirects to http://{endpoint.host}/other?***: name" in fails(endpoint.url)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>\nhello</html>", "no JSON came back but '<html> hello</html>'"),
        (b"", "no JSON came back but ''"),
        ({"score": [1, 2]}, 'expected {"scores": [...]}, one number an answer; got {'),
        ([1, 2], "got [1, 2]"),
        ({"scores": 1.0}, "scores is no list: 1.0"),
        ({"scores": [1.0]}, "1 scores for 2 answers"),
        ({"rewards": [1.0, 2.0, 3.0]}, "3 rewards for 2 answers"),
        ({"scores": [1.0, "2.0"]}, "row 1 scored '2.0', not a number"),
        ({"scores": [True, 1.0]}, "row 0 scored True, not a number"),
        ({"scores": [None, 1.0]}, "row 0 scored None, not a number"),
        ({"scores": [[1.0], 1.0]}, "row 0 scored [1.0], not a number"),
        (b'{"scores": [NaN, 1.0]}', "row 0 scored nan, not a finite number"),
        (b'{"scores": [0.0, -Infinity]}', "row 1 scored -inf, not a finite number"),
        ({"scores": ["x" * 10_000, 1.0]}, "row 0 scored 'xxx"),
        ({"scores": [1.0, 10**400]}, "row 1 scored 1000"),
        ({"scores": [-(10**400), 1.0]}, "row 0 scored -1000"),
        (b"[" * 200_000 + b"]" * 200_000, "the JSON that came back is nested too deeply"),
        (b"9" * 10_000, "no JSON came back but '999"),
        ({"scores": "\ud800"}, r"scores is no list: '\ud800'"),
    ],
)  # fmt: skip
def test_what_came_back_is_no_list_of_scores(serve, content, message):
    endpoint = serve(lambda n, handler: send(handler, content))
    found = fails(endpoint.url, retries=3)
    assert found.startswith(f"reward endpoint {endpoint.url}: ")
    assert message in found
    assert len(found) < 300
    assert len(endpoint.seen) == 1  # the same would come again


def test_a_login_is_sent_and_never_shown(serve, caplog):
    endpoint = serve(lambda n, handler: send(handler, b"", 503))
    url = f"http://me:p%40ss@{endpoint.host}/score?token=hidden"
    with caplog.at_level(logging.DEBUG):
        message = fails(url, retries=1)
    sent = endpoint.seen[0]["headers"]["Authorization"]
    assert sent == "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert endpoint.seen[0]["path"] == "/score?token=hidden"
    assert endpoint.seen[0]["headers"]["Host"] == endpoint.host
    for text in (message, caplog.text):
        assert f"http://***@{endpoint.host}/score?***" in text
        assert "hidden" not in text
        assert "p%40ss" not in text


def test_proxies_of_the_environment_are_used(serve, monkeypatch):
    proxy = serve(lambda n, handler: send(handler, {"scores": [3.0, 4.0]}))
    monkeypatch.setenv("http_proxy", f"http://{proxy.host}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert ask("http://no.such.host.example/score") == [3.0, 4.0]
    assert proxy.seen[0]["path"] == "http://no.such.host.example/score"
