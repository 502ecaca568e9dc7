"""One rollout of a model at a time: its modules are in another state for as long as it lasts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

_LOCKS: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()


@contextmanager
def exclusively(model: nn.Module) -> Iterator[None]:
    """Hold a model for a rollout, outside inference mode.

    What a rollout allocates outlives it: made in inference mode, it could not be written to by
    the next rollout outside.

    Args:
        model: the module that generates.

    Raises:
        RuntimeError: it is generating already, in another thread or around this call.
    """
    lock = _LOCKS.setdefault(model, threading.Lock())
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            "this model is generating already, in another thread or around this call (a hook?): "
            "wait for that rollout to end"
        )
    try:
        with torch.inference_mode(False):
            yield
    finally:
        lock.release()
