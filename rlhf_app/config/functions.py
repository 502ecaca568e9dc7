"""Naming a Python function in the settings: `module:function` or `file.py:function`."""

from __future__ import annotations

import re
from pathlib import Path

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_FUNCTION = re.compile(rf"({_DOTTED}|.+\.py):{_DOTTED}")


def names_function(spec: str) -> bool:
    """Returns whether a text has the form of a function's name."""
    return _FUNCTION.fullmatch(spec) is not None


def function_file(spec: str) -> str:
    """Returns the file whose content decides what a function does, or an empty text.

    A module has a file of its own where it lies in the current directory; that of a package is
    its `__init__.py`.
    """
    module = spec.rpartition(":")[0]
    if not module or module.endswith(".py"):
        return module
    name = Path(*module.split("."))
    # In the order in which Python looks.
    files = (name / "__init__.py", name.with_suffix(".py"))
    return next((str(file) for file in files if file.is_file()), "")
