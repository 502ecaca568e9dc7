"""Directories that are built once per machine and never change afterwards.

Whoever needs one waits at a file lock, and no collective: only one process builds. It builds in a
directory of its own beside, and renaming that publishes it whole. Where locks do not work (some
network file systems) the work is done twice, and the result is the same.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from rlhf_app.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")


def cache_root(setting: str | None) -> Path:
    """Returns the directory of the cache.

    Args:
        setting: `data.cache_dir`.
    """
    if setting or os.environ.get("RLHF_CACHE"):
        return Path(setting or os.environ["RLHF_CACHE"]).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "rlhf"


def published(root: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Returns `root/name`, which is built first where it does not exist.

    Args:
        root: of the cache; made where it does not exist.
        name: says everything that decides the content.
        build: fills an empty directory.

    Raises:
        ConfigError: the cache cannot be written to.
    """
    target = root / name
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{name}.lock")
        try:
            lock.acquire(timeout=1)
        except Timeout:
            log.info("another process prepares %s; waiting for it", target)
            lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: {root} cannot be written to ({error}); name another directory"
        ) from error
    try:
        if not target.is_dir():
            _build(target, build)
    finally:
        lock.release()
    return target


def _build(target: Path, build: Callable[[Path], None]) -> None:
    host = socket.gethostname()
    for left in target.parent.glob(f"{target.name}.tmp.{host}.*"):
        # A process on this machine that is gone left it behind.
        if not _alive(int(left.name.split(".")[-2])):
            shutil.rmtree(left, ignore_errors=True)
    folder = target.with_name(f"{target.name}.tmp.{host}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        build(folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # else someone whom the lock did not stop was faster
                raise
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: {target} cannot be written ({error}); name another directory"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def opened(root: Path, name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Returns what `load` makes of `published(root, name, build)`; a damaged one is built again.

    Args:
        root: of the cache.
        name: says everything that decides the content.
        build: fills an empty directory.
        load: opens the directory; OSError, ValueError and KeyError mean that it is damaged.

    Raises:
        ConfigError: the cache cannot be written to, or not be read back.
    """
    target = published(root, name, build)
    try:
        return load(target)
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s is damaged and will be made again: %s", target, error)
    aside = target.with_name(f"{name}.tmp.{socket.gethostname()}.{os.getpid()}.damaged")
    with suppress(OSError):  # another process was faster
        target.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
    target = published(root, name, build)
    try:
        return load(target)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"data.cache_dir: {target} cannot be read back ({error}); name another directory"
        ) from error
