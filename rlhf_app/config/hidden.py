"""Passwords in settings: left out of `config.yaml`, and given to the workers another way.

The file says `http://***@host/score?***`. What stands there in truth goes into the environment of
the worker processes, which other users cannot read and which no file keeps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.url_secrets import without_secrets

_VARIABLE = "RLHF_HIDDEN_SETTINGS"

#: Keys and list indices that lead to a value.
_Place = tuple[str | int, ...]


def shown_values(config: RunConfig) -> dict[str, Any]:
    """All settings as plain values, without what is secret in them."""
    values: dict[str, Any] = config.model_dump(mode="json")
    for place, text in _texts(values):
        _at(values, place[:-1])[place[-1]] = without_secrets(text)
    return values


def hidden_settings(config: RunConfig) -> dict[str, str]:
    """Environment variables that tell worker processes what `shown_values` leaves out."""
    hidden = [
        (place, text)
        for place, text in _texts(config.model_dump(mode="json"))
        if without_secrets(text) != text
    ]
    return {_VARIABLE: json.dumps(hidden)} if hidden else {}


def put_hidden_back(values: dict[str, Any]) -> None:
    """Replaces, in what was read from `config.yaml`, the values that this process was told."""
    for place, text in json.loads(os.environ.get(_VARIABLE, "[]")):
        try:
            written = _at(values, place[:-1])[place[-1]]
        except (LookupError, TypeError):
            continue  # the file was changed by hand: its own values count
        if written == without_secrets(text):
            _at(values, place[:-1])[place[-1]] = text


def refuse_hidden(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Refuses an address whose secret part was left out when it was written.

    Args:
        values: dotted settings.
        origins: of each, where it came from.

    Raises:
        ConfigError: names the setting.
    """
    for place, text in _texts(dict(values)):
        if "://***@" in text or ("://" in text and text.endswith("?***")):
            key = str(place[0])
            raise ConfigError(
                f"{key} = {text} (from {origins.get(key, 'code')}): its password or query is not "
                "kept in files of a run; give the whole address again"
            )


def _texts(values: Any, place: _Place = ()) -> list[tuple[_Place, str]]:
    if isinstance(values, str):
        return [(place, values)]
    if isinstance(values, Mapping):
        items: Any = values.items()
    elif isinstance(values, list | tuple):
        items = enumerate(values)
    else:
        return []
    return [found for key, value in items for found in _texts(value, (*place, key))]


def _at(values: Any, place: Sequence[str | int]) -> Any:
    for key in place:
        values = values[key]
    return values
