"""Files of the cache that this process works with: held open, marked as in use, and watched.

What is held survives that somebody deletes the directory. What is overwritten, cut, or lost with
its network file system is noticed before anything is read of it, since reading a page of a
mapped file that is gone kills the process (SIGBUS).
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from data_sources.sealed import USED, Damaged, check
from rlhf_app.errors import ConfigError


class HeldFiles:
    """Files of a directory, held until the object goes.

    Args:
        folder: the directory.
        names: of the files.

    Raises:
        OSError: one is missing or cannot be read.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        opened: list[int] = []
        # Also where a file is missing.
        weakref.finalize(self, _close, opened).atexit = False
        _mark_used(folder, opened)
        self._files: list[tuple[str, int, tuple[int, int]]] = []
        for name in names:
            file = os.open(folder / name, os.O_RDONLY)
            opened.append(file)
            self._files.append((name, file, _state(file)))

    def check(self) -> None:
        """Makes sure that the files are as they were when they were opened.

        Raises:
            ConfigError: one has been changed, or cannot be read any more.
        """
        for place, (name, file, state) in enumerate(self._files):
            try:
                found = _state(file)
                if found == state:
                    continue
                # Somebody may have done no more than touch it, as against the purge of a cluster.
                if not os.path.samestat(os.fstat(file), os.stat(self._folder / name)):
                    raise Damaged(f"{name} was changed")
                check(self._folder)
            except (OSError, Damaged) as error:
                raise lost(self._folder, str(error)) from error
            self._files[place] = (name, file, found)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wraps what reads the files.

        Raises:
            ConfigError: they cannot be read any more.
        """
        self.check()
        try:
            yield
        except OSError as error:
            raise lost(self._folder, str(error)) from error


def lost(folder: Path, why: str) -> ConfigError:
    """Returns the error of a directory that was damaged while it was in use."""
    return ConfigError(
        f"data.cache_dir: {folder} became unreadable while it was in use ({why}); start again: "
        "it is checked and made anew, and leave the cache alone meanwhile or name another directory"
    )


@contextmanager
def unused(folder: Path) -> Iterator[bool]:
    """Yields whether no living process uses a directory; none can begin to meanwhile.

    Args:
        folder: a directory of the cache.
    """
    try:
        # Some network file systems lock only what may be written to.
        mode = os.O_RDWR if os.access(folder / USED, os.W_OK) else os.O_RDONLY
        file = os.open(folder / USED, mode | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True  # it was never finished, or an earlier version made it
        return
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # someone has it, or locks do not work here: nobody knows
            free = False
        else:
            free = True
        yield free
    finally:
        os.close(file)


def _mark_used(folder: Path, opened: list[int]) -> None:
    """Touches the marker and shares its lock, as far as that is possible."""
    try:
        marker = os.open(folder / USED, os.O_RDONLY)
    except OSError:
        return  # a copy without it, which is read all the same
    opened.append(marker)
    with suppress(OSError):
        fcntl.flock(marker, fcntl.LOCK_SH)
    with suppress(OSError):  # a directory that may only be read
        os.utime(marker)
    if os.stat(folder / USED).st_ino != os.fstat(marker).st_ino:
        raise FileNotFoundError(f"{folder} was replaced")


def _state(file: int) -> tuple[int, int]:
    # The inode's own time changes also when the file is deleted, which harms nobody who has it.
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def _close(files: list[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)
