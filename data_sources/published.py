"""Directories that are built once per machine and never change afterwards.

Whoever needs one waits at a file lock, and no collective: only one process builds. It builds in a
directory of its own beside, and renaming that publishes it whole. Where locks do not work (some
network file systems) the work is done twice, and the result is the same. Its files are sealed with
checksums, which every process looks at when it first opens the directory.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from data_sources.held_files import HeldFiles
from data_sources.sealed import SEAL, check, seal
from rlhf_app.errors import ConfigError
from rlhf_app.home import expanded

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Fills an empty directory, and returns in words what it was made of.
Build = Callable[[Path], str | None]
_DAMAGE = (OSError, ValueError, KeyError)


def cache_root(setting: str | None) -> Path:
    """Returns the directory of the cache.

    Args:
        setting: `data.cache_dir`.

    Raises:
        ConfigError: it lies in a home directory that nobody knows.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    root = setting or os.environ.get("RLHF_CACHE") or (f"{home}/rlhf" if home else "~/.cache/rlhf")
    found = expanded(root)
    if str(found).startswith("~") and not found.exists():
        raise ConfigError(
            f"data.cache_dir: no home directory is known for {root}; set it, or $RLHF_CACHE, to a "
            "directory in full"
        )
    return found


def published(root: Path, name: str, build: Build) -> Path:
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
    with building(root, name):
        if not target.is_dir():
            _make_room(target, "it is no directory")
            _build(target, build)
    return target


def opened(root: Path, name: str, build: Build, load: Callable[[Path], T]) -> T:
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
        return _checked(target, load)
    except _DAMAGE:
        pass
    with building(root, name):
        # Another process may have built it again since.
        try:
            return _checked(target, load)
        except _DAMAGE as error:
            _make_room(target, error)
        _build(target, build)
    try:
        return _checked(target, load)
    except _DAMAGE as error:
        raise ConfigError(
            f"data.cache_dir: {target} cannot be read back ({error}); name another directory"
        ) from error


@contextmanager
def building(root: Path, name: str, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of those who build or remove a directory.

    Args:
        root: of the cache; made where it does not exist.
        name: of the directory.
        wait: for as long as another process has it.

    Raises:
        ConfigError: the cache cannot be written to.
        Timeout: another process has it, and `wait` is not set.
    """
    target = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{name}.lock")
        try:
            lock.acquire(timeout=1 if wait else 0)
        except Timeout:
            if not wait:
                raise
            log.info("another process prepares %s; waiting for it", target)
            lock.acquire()
    except Timeout:  # of the kind OSError
        raise
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: {root} cannot be written to ({error}); name another directory"
        ) from error
    try:
        yield
    finally:
        lock.release()


def builder_alive(folder: Path) -> bool | None:
    """Returns whether the process runs that makes an unfinished directory.

    Args:
        folder: beside the one that it is to become.

    Returns:
        None where it is a process of another machine.
    """
    host, _, number = folder.name.partition(".tmp.")[2].rpartition(".")[0].rpartition(".")
    if host != socket.gethostname() or not number.isdigit():
        return None
    return _alive(int(number))


def put_aside(target: Path) -> Path:
    """Renames a directory of the cache, so that nobody finds it, and returns where it is now.

    Raises:
        OSError: it cannot be renamed.
    """
    return target.rename(_beside(target))


def _checked(target: Path, load: Callable[[Path], T]) -> T:
    # The directory is in use, and not cleared by anybody, from here on.
    held = HeldFiles(target, [SEAL])
    check(target)
    found = load(target)
    del held
    return found


def _build(target: Path, build: Build) -> None:
    for left in target.parent.glob(f"{target.name}.tmp.*"):
        if builder_alive(left) is False:
            shutil.rmtree(left, ignore_errors=True)
    folder = _beside(target)
    folder.mkdir()
    try:
        about = build(folder)
        seal(folder, target.name, about or "")
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


def _make_room(target: Path, why: object) -> None:
    """Takes what is damaged away, if anything; processes that have it open keep what they have."""
    if not target.exists() and not target.is_symlink():
        return
    log.warning("%s is damaged and will be made again: %s", target, why)
    try:
        aside = put_aside(target)
        if aside.is_symlink() or not aside.is_dir():
            aside.unlink()
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: {target} is damaged ({why}) and cannot be removed ({error}); "
            "delete it, or name another directory"
        ) from error
    shutil.rmtree(aside, ignore_errors=True)


def _beside(target: Path) -> Path:
    owner = f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    return target.with_name(f"{target.name}.tmp.{owner}")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
