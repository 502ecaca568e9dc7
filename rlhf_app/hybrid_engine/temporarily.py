"""One attribute of some objects, set for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(objects: Iterable[Any], name: str, value: object) -> Iterator[None]:
    """Set an attribute of each object; each gets its own old value back, also on exceptions.

    Args:
        objects: all of them have the attribute.
        name: of the attribute.
        value: for the time of the context.
    """
    kept = [(thing, getattr(thing, name)) for thing in objects]
    try:
        for thing, _ in kept:
            setattr(thing, name, value)
        yield
    finally:
        for thing, old in kept:
            setattr(thing, name, old)
