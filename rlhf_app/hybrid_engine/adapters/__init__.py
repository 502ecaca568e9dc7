"""Attention adapters for families that do not use transformers' attention interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def installed(model: nn.Module) -> Iterator[None]:
    """Route the attention of families that need it to the active step; restore on exit.

    Args:
        model: any causal LM; most need nothing.
    """
    yield
