"""Modules of Triton kernels, where Triton is."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def kernels(module: str) -> Any:
    """A module of kernels, compiled when they are first launched; None where Triton is missing.

    Args:
        module: its full name.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
