"""The phases of a run: for the controller, which watches them, and for errors, which name them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_app.training.heartbeat import beat

_PHASE = "phase_of_the_run"


@contextmanager
def within(phase: str) -> Iterator[None]:
    """The body, or a function that it decorates, is a phase: an exception that leaves it says so.

    The outermost name stays: a rollout of an evaluation is evaluation.
    """
    beat(phase)
    try:
        yield
    except Exception as error:
        error.__dict__[_PHASE] = phase
        raise


def phase_of(error: BaseException) -> str | None:
    """The phase in which an exception, or what caused it, was raised; None: outside of all."""
    named: str | None = error.__dict__.get(_PHASE)
    if named is None and error.__cause__ is not None:
        return phase_of(error.__cause__)
    return named
