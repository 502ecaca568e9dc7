"""Texts as they may be shown: without the passwords and tokens that a user may have put there.

Everything that prints, logs or writes for people goes through `without_secrets`.
"""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, unquote, urlsplit

_LOGIN = re.compile(r"([a-z][a-z0-9+.-]*://)[^/\s?#@'\"]*(?:@[^/\s?#@'\"]*)*@", re.IGNORECASE)
# What was hidden before stays as it is, with what follows it.
_QUERY = re.compile(r"(https?://[^\s?#'\"]*)[?#](?!\*\*\*)[^\s'\"]*", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_HEADER = re.compile(r"(\b(?:Basic|Bearer) )(?=\S+[0-9A-Z=])[A-Za-z0-9+/._~-]{12,}=*")
# A shorter text occurs by chance in others.
_SHORTEST = 6
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY)$")


def without_secrets(text: str, addresses: Iterable[str] = ()) -> str:
    """Hides what may be secret in a text.

    Args:
        text: an address, an error message, a log line or a page of settings.
        addresses: whose login and query must not stand alone in the text either, such as those
            of a server that the text comes from.

    Returns:
        The text with `user:password@` of every address as `***@`, a query or fragment of a web
        address as `?***`, and as `***` tokens of the Hub, authorisation headers, and values of
        environment variables that are called a token, secret, password or key.
    """
    text = _QUERY.sub(r"\1?***", _LOGIN.sub(r"\1***@", text))
    text = _HEADER.sub(r"\1***", _HUB_TOKEN.sub("hf_***", text))
    known = [value for name, value in os.environ.items() if _SECRET_NAME.search(name.upper())]
    for address in addresses:
        known += _parts(address)
    for value in sorted(known, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return text


def _parts(address: str) -> list[str]:
    """What is secret in an address: as it stands, decoded, and as a header has it."""
    try:
        parts = urlsplit(address)
        login = parts.netloc.rpartition("@")[0]
    except ValueError:
        return []
    words = [parts.password or "", *(value for _, value in parse_qsl(parts.query))]
    found = [*words, *map(unquote, words), parts.query]
    if login:
        plain = unquote(login)
        found += [login, plain, base64.b64encode(plain.encode()).decode()]
    return found


class WithoutSecrets(logging.Formatter):
    """Formats log records, tracebacks included, and hides what is secret in them."""

    def format(self, record: logging.LogRecord) -> str:
        """The line or lines of a record."""
        return without_secrets(super().format(record))
