"""What lies in the cache, and its removal: no store in use, and nothing that is not the cache's."""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import Timeout

from data_sources.held_files import unused
from data_sources.published import builder_alive, building, put_aside
from data_sources.sealed import USED, Damaged, read_seal
from rlhf_app.errors import ConfigError

_NAMES = {"records": re.compile(r"[0-9a-f]{32}"), "tokens": re.compile(r"[a-z]+-[0-9a-f]{32}")}
_UNFINISHED = ".tmp."
# Files of a store; a directory with any others is not removed.
_OWN = re.compile(r"[a-z_]+\.bin|records\.arrow|facts\.json|seal\.json|used")
_HASHES = "contents"
_HASH = re.compile(r"[0-9a-f]{32}(\.[0-9]+)?")
_DAY = 86_400
IN_USE = "in use"


@dataclass(frozen=True, slots=True)
class Store:
    """A directory of the cache.

    Attributes:
        folder: where it is.
        kind: records, tokens for a kind of training, or an unfinished one of these.
        about: what it was made of, in words.
        size: bytes of its files.
        used: when it was last opened, in seconds since the epoch.
        in_use: whether a living process has it open, or builds it.
    """

    folder: Path
    kind: str
    about: str
    size: int
    used: float
    in_use: bool


@dataclass(slots=True)
class Cleared:
    """What became of the stores.

    Attributes:
        removed: those that are gone.
        kept: (directory, why) of the others.
    """

    removed: list[Store] = field(default_factory=list)
    kept: list[tuple[Path, str]] = field(default_factory=list)


def stores(root: Path) -> list[Store]:
    """Returns the stores of a cache, those first that were used last.

    Args:
        root: of the cache; need not exist.

    Raises:
        ConfigError: it cannot be read.
    """
    found = []
    for folder in _folders(root):
        try:
            found.append(_store(folder))
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            raise _unreadable(folder, error) from error
    return sorted(found, key=lambda store: (-store.used, store.folder))


def clear(root: Path, older_than: float | None = None) -> Cleared:
    """Removes the stores of a cache that no living process uses.

    Args:
        root: of the cache; need not exist.
        older_than: days; only what was not used for as long is removed.

    Raises:
        ConfigError: something cannot be read or removed; the rest has been.
    """
    before = time.time() - (older_than or 0) * _DAY
    every = older_than is None
    result, failures = Cleared(), []
    for store in stores(root):
        try:
            why = _clear(store, None if every else before)
        except OSError as error:
            failures.append(f"{store.folder} ({error.strerror or error})")
            continue
        if why:
            result.kept.append((store.folder, why))
        else:
            result.removed.append(store)
    for path in _entries(root / _HASHES):
        if _HASH.fullmatch(path.name) and _is(path, stat.S_ISREG):
            with suppress(FileNotFoundError):
                if every or path.lstat().st_mtime < before:
                    path.unlink()
    if failures:
        raise ConfigError(
            f"data.cache_dir: {len(failures)} stores cannot be removed, the first: {failures[0]}; "
            "see whose they are, and delete them by hand"
        )
    return result


def _clear(store: Store, before: float | None) -> str:
    """Removes a store; returns why not, or an empty text."""
    folder = store.folder
    name = folder.name.partition(_UNFINISHED)[0]
    try:
        # Neither a process that builds it nor one that opens it comes between.
        with building(folder.parent, name, wait=False), unused(folder) as free:
            if not free or _being_built(folder):
                return IN_USE
            if before is not None and _last_used(folder) >= before:
                return "used since"
            foreign = [path.name for path in folder.iterdir() if not _own(path)]
            if foreign:
                return f"holds {foreign[0]}, which is not the cache's"
            aside = folder if _UNFINISHED in folder.name else put_aside(folder)
            for path in aside.iterdir():
                path.unlink()
            aside.rmdir()
            with suppress(OSError):
                (folder.parent / f"{name}.lock").unlink()
    except Timeout:
        return IN_USE
    except FileNotFoundError:  # removed meanwhile
        pass
    return ""


def _store(folder: Path) -> Store:
    unfinished = _UNFINISHED in folder.name
    kind = "records"
    if folder.parent.name == "tokens":
        kind = f"tokens ({folder.name.partition('-')[0]})"
    about = "unknown"
    if unfinished:
        kind, about = f"unfinished {kind}", "left by a process that was stopped"
    with suppress(OSError, Damaged):
        about = read_seal(folder).about or about
    size = sum(path.lstat().st_size for path in folder.iterdir())
    with unused(folder) as free:
        in_use = not free or _being_built(folder)
    if in_use and unfinished:
        about = "being made"
    return Store(folder, kind, about, size, _last_used(folder), in_use)


def _being_built(folder: Path) -> bool:
    """Whether an unfinished directory has a builder, as far as this machine can tell."""
    if _UNFINISHED not in folder.name:
        return False
    alive = builder_alive(folder)
    # Of another machine: the lock tells, unless the file system has none.
    return time.time() - _last_used(folder) < _DAY if alive is None else alive


def _last_used(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return (folder / USED).lstat().st_mtime
    # Unfinished, or of an earlier version.
    return max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))


def _folders(root: Path) -> Iterator[Path]:
    for part, names in _NAMES.items():
        for path in _entries(root / part):
            name = path.name.partition(_UNFINISHED)[0]
            if names.fullmatch(name) and _is(path, stat.S_ISDIR):
                yield path


def _entries(folder: Path) -> list[Path]:
    """Of a directory, but of none that a link leads to; empty where there is none."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return []
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"data.cache_dir: {folder} cannot be read ({error.strerror}); see its permissions"
    )


def _is(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether a path itself, and nothing that it leads to, is of a kind."""
    try:
        return kind(path.lstat().st_mode)
    except OSError:
        return False


def _own(path: Path) -> bool:
    return _OWN.fullmatch(path.name) is not None and _is(path, stat.S_ISREG)
