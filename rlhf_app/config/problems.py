"""Turns a validation failure into one line: setting, value, where it came from, expected."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlhf_app.config.keys import all_fields, did_you_mean, item_did_you_mean, setting_keys
from rlhf_app.url_secrets import without_secrets

_LONGEST_VALUE = 80
_VALUES = reprlib.Repr()  # never writes a large value out whole, only to cut it
_VALUES.maxstring = _VALUES.maxother = _VALUES.maxlong = _LONGEST_VALUE + 1


def describe(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line for the first bad setting, with a count of the others.

    Args:
        error: what pydantic raised for a `RunConfig`.
        origins: dotted setting -> where its value came from, such as `run.yaml`.
    """
    by_key: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors():
        by_key.setdefault(_dotted(detail["loc"]), []).append(detail)
    lines = [_line(key, details, origins) for key, details in by_key.items()]
    more = len(lines) - 1
    return lines[0] + (f" (and {more} more bad setting{'s' * (more > 1)})" if more else "")


def _dotted(location: tuple[int | str, ...]) -> str:
    """Rebuild the dotted setting; pydantic adds names of union members, which are left out."""
    key = ""
    rest: list[int | str] = list(location)
    while rest and f"{key}.{rest[0]}".lstrip(".") in all_fields():
        key = f"{key}.{rest.pop(0)}".lstrip(".")
    if rest and isinstance(rest[0], int):  # an element of a list such as data.sources[1].path
        key += f"[{rest[0]}]" + "".join(f".{part}" for part in rest[1:])
    return key


def _line(key: str, details: list[ErrorDetails], origins: Mapping[str, str]) -> str:
    first = details[0]
    base = key.partition("[")[0]
    origin = origins.get(base)
    came_from = f" (from {origin})" if origin else ""
    if first["type"] == "extra_forbidden":
        # Of an item of a list, such as data.sources[0].wieght, the item's own settings.
        meant = did_you_mean(base) if base == key else item_did_you_mean(base, key)
        return f"{key}: unknown setting{came_from}{meant}"
    if first["type"] == "missing":
        return f"{key}: missing{came_from}"
    if not key:
        return _expected(first)
    wanted = dict.fromkeys(_expected(detail) for detail in details)
    expected = " or ".join(wanted).replace(" or expected ", " or ")
    if first["type"] == "value_error" and key not in setting_keys() and "[" not in key:
        # Of several settings: their names say what is meant, the whole group would drown it.
        text = _with_full_names(key, expected)
        return text if text.startswith(f"{key}.") else f"{key}: {text}"
    value = without_secrets(_VALUES.repr(first["input"]))
    if len(value) > _LONGEST_VALUE:
        value = value[:_LONGEST_VALUE] + "..."
    return f"{key} = {value}{came_from}: {expected}"


def _with_full_names(group: str, text: str) -> str:
    """Put `ppo.` and the like before settings of the group, as flags and files write them.

    Names of one word may be plain words, which only a validator's author can tell.
    """
    names = [
        key.removeprefix(f"{group}.")
        for key in all_fields()
        if key.startswith(f"{group}.") and "_" in key.rpartition(".")[2]
    ]
    if not names:
        return text
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.])({longest_first})(?!\w|\.\w)", rf"{group}.\1", text)


def _expected(detail: ErrorDetails) -> str:
    message = detail["msg"]
    for prefix, replacement in (("Input should be ", "expected "), ("Value error, ", "")):
        if message.startswith(prefix):
            return replacement + message.removeprefix(prefix)
    return message
