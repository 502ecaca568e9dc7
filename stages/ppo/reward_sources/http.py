"""Rewards from an HTTP endpoint: POST of prompts and responses, answered with scores."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import queue
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from rlhf_app.errors import ConfigError
from rlhf_app.url_secrets import without_secrets
from stages.ppo.reward_sources.texts import TextAnswers

log = logging.getLogger(__name__)

# A server that is starting, overloaded or behind a broken gateway may well answer later.
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_WAIT = 30.0
_LARGEST_ANSWER = 64 * 2**20
_LARGEST_SCORE = sys.float_info.max
_SHOWN = 120


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET without its body."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


class _Failed(Exception):
    """One attempt that may go well the next time."""


class HttpReward:
    """Asks an endpoint for the scores of this rank's answers.

    A login in the address is sent as basic authorisation. Proxies are those of the environment
    (`http_proxy`, `no_proxy`, ...), as urllib finds them.

    Args:
        url: the address.
        timeout: seconds that one attempt may take as a whole.
        retries: further attempts when the endpoint cannot be reached, is too slow, or answers
            with a status that says "later".
        first_wait: seconds before the first of them; doubled each time.
    """

    def __init__(self, url: str, *, timeout: float, retries: int, first_wait: float = 1.0) -> None:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self._url = urlunsplit((parts.scheme, host, parts.path or "/", parts.query, ""))
        self._shown = without_secrets(url)
        self._given = url
        self._timeout = timeout
        self._retries = retries
        self._first_wait = first_wait
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            coded = base64.b64encode(login.encode()).decode("ascii")
            self._headers["Authorization"] = f"Basic {coded}"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def __call__(self, answers: TextAnswers) -> list[float]:
        """One finite number an answer.

        Raises:
            ConfigError: names the address and what came back.
        """
        body = json.dumps(
            {"prompts": answers.prompt_texts, "responses": answers.responses}
        ).encode()
        reason = ""
        for attempt in range(self._retries + 1):
            if attempt:
                wait = min(_LONGEST_WAIT, self._first_wait * 2.0 ** (attempt - 1))
                log.info("reward endpoint %s: %s; again in %g s", self._shown, reason, wait)
                time.sleep(wait)
            try:
                return self._scores(self._post(body), len(answers.responses))
            except _Failed as error:
                reason = str(error)
        raise self._error(f"{reason}, {self._retries + 1} time(s); is the server running?")

    def _post(self, body: bytes) -> bytes:
        """One exchange, in a thread of its own that is left behind at the deadline.

        The timeout of a socket holds for each read alone: names that are not resolved, or
        headers and bodies that trickle in, could take hours.
        """
        done: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        refused: list[int] = []
        ends = time.monotonic() + self._timeout

        def work() -> None:
            try:
                done.put(self._exchange(body, ends, refused))
            except Exception as error:
                done.put(error)

        threading.Thread(target=work, daemon=True, name="reward endpoint").start()
        try:
            found = done.get(timeout=self._timeout)
        except queue.Empty:
            if refused:
                raise self._error(f"status {refused[0]}") from None
            raise _Failed(self._describe(TimeoutError())) from None
        if isinstance(found, Exception):
            raise found
        return found

    def _exchange(self, body: bytes, ends: float, refused: list[int]) -> bytes:
        request = urllib.request.Request(  # noqa: S310 - the settings let only http(s) through
            self._url, body, self._headers, method="POST"
        )
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return self._read(response, ends)
        except urllib.error.HTTPError as error:
            if error.code in _RETRIED_STATUS:
                raise _Failed(f"status {error.code}") from None
            refused.append(error.code)  # known, though why may come too late
            raise self._error(f"status {error.code}{self._reason(error)}") from None
        except (TimeoutError, OSError, http.client.HTTPException) as error:
            raise _Failed(self._describe(error)) from None

    def _read(self, response: Any, ends: float) -> bytes:
        """All of an answer; past the deadline nobody waits for it any more."""
        parts, size = [], 0
        while part := response.read1(2**16):
            parts.append(part)
            size += len(part)
            if size > _LARGEST_ANSWER:
                raise self._error(f"an answer of more than {_LARGEST_ANSWER} bytes")
            if time.monotonic() > ends:
                raise TimeoutError
        return b"".join(parts)

    def _describe(self, error: BaseException) -> str:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            return f"no answer within {self._timeout:g} s"
        if isinstance(reason, ConnectionRefusedError):
            return "connection refused"
        return f"{type(reason).__name__}: {self._short(str(reason))}"

    def _reason(self, error: urllib.error.HTTPError) -> str:
        """What the server says about a request that it refuses."""
        moved = error.headers.get("Location") if 300 <= error.code < 400 else None
        if moved:
            shown = self._short(urljoin(self._url, moved))
            return f"; it redirects to {shown}: name that"
        with contextlib.suppress(OSError, http.client.HTTPException):
            body = self._short(error.read(4 * _SHOWN).decode(errors="replace"))
            return f": {body}" if body else ""
        return ""

    def _scores(self, content: bytes, count: int) -> list[float]:
        try:
            return self._parsed(content, count)
        except RecursionError:
            raise self._error("the JSON that came back is nested too deeply") from None

    def _parsed(self, content: bytes, count: int) -> list[float]:
        try:
            answer = json.loads(content)
        except ValueError:
            shown = self._short(content[: 4 * _SHOWN].decode(errors="replace"))
            raise self._error(f"no JSON came back but {shown!r}") from None
        found = [key for key in ("scores", "rewards") if isinstance(answer, dict) and key in answer]
        if not found:
            shown = self._short(str(answer))
            raise self._error(f'expected {{"scores": [...]}}, one number an answer; got {shown}')
        values = answer[found[0]]
        if not isinstance(values, list):
            raise self._error(f"{found[0]} is no list: {self._short(repr(values))}")
        if len(values) != count:
            raise self._error(f"{len(values)} {found[0]} for {count} answers")
        for row, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self._error(f"row {row} scored {self._short(repr(value))}, not a number")
            if not -_LARGEST_SCORE <= value <= _LARGEST_SCORE:  # NaN is not either
                shown = self._short(str(value))
                raise self._error(f"row {row} scored {shown}, not a finite number")
        return [float(value) for value in values]

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"reward endpoint {self._shown}: {what}")

    def _short(self, text: str) -> str:
        """What a server says, which may be the login or the key that it was sent."""
        text = without_secrets(" ".join(text.split()), (self._given,))
        return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
