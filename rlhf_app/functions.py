"""Functions that users bring: `module:function` or `path/to/file.py:function`. Free of torch."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_app.errors import ConfigError
from rlhf_app.home import expanded


def load_function(kind: str, spec: str, example: str) -> Callable[..., Any]:
    """Finds a function.

    Args:
        kind: what it is used as ("scorer"), for messages.
        spec: `module:function`, where the current directory is importable too, or
            `path/to/file.py:function`. A dotted function is looked up part by part.
        example: a good spec, for messages.

    Returns:
        The function itself.

    Raises:
        ConfigError: bad spec, no such module, file or function; or an import that fails.
    """
    shown = f"{kind} {spec}"
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ConfigError(
            f"{shown}: expected module:function or file.py:function, for example {example}"
        )
    found: Any = _module(shown, source)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(
                f"{shown}: {source} has no {name}; check the name after the colon"
            ) from None
    if not callable(found):
        raise ConfigError(f"{shown}: {name} is of type {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


@contextlib.contextmanager
def same_directory() -> Iterator[None]:
    """Runs code of the user that may change the current directory: our paths start there."""
    before = Path.cwd()
    try:
        yield
    finally:
        os.chdir(before)


def _make_importable(directory: Path) -> None:
    """Behind everything else: a file there must not replace an installed package.

    It stays there, since a function may import its neighbours only when it is called.
    """
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _module(shown: str, source: str) -> ModuleType:
    if source.endswith(".py"):
        return _module_of_file(shown, expanded(source))
    here = Path.cwd()
    _make_importable(here)
    try:
        with same_directory():
            return importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or source
        if source == missing or source.startswith(f"{missing}."):
            raise ConfigError(
                f"{shown}: no module {missing} in {here} or among the installed packages"
            ) from error
        raise ConfigError(f"{shown}: {source} needs the package {missing}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(_import_failed(shown, source, error)) from error


def _module_of_file(shown: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{shown}: no file {path}")
    _make_importable(path.resolve().parent)
    # A name that no import statement can produce: the file never stands in for a package.
    name = f"function:{path.resolve()}"
    description = importlib.util.spec_from_file_location(name, path.resolve())
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    # Dataclasses and pickle look their own module up.
    sys.modules[name] = module
    try:
        with same_directory():
            description.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(_import_failed(shown, str(path), error)) from error
    return module


def _import_failed(shown: str, source: str, error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{shown}: importing {source} failed with {type(error).__name__}: {first}"
