"""Addresses as they may be shown: without passwords, and without the values of a query."""

from __future__ import annotations

import re

_LOGIN = re.compile(r"(https?://)[^/\s?#@'\"]*(?:@[^/\s?#@'\"]*)*@", re.IGNORECASE)
_QUERY = re.compile(r"(https?://[^\s?#'\"]*)[?#][^\s'\"]*", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Hides what may be secret in every http address of a text.

    Args:
        text: an address, an error message or a page of settings.

    Returns:
        The text with `user:password@` as `***@`, and a query or fragment as `?***`.
    """
    return _QUERY.sub(r"\1?***", _LOGIN.sub(r"\1***@", text))
