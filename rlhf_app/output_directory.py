"""Takes possession of a run directory: ours or empty, writable, and used by one run only."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_app.errors import ConfigError
from rlhf_app.manifest import Manifest
from rlhf_app.run_directory import RunDirectory

_LOCK = ".lock"
_OTHERS = 0o077


def check_output_directory(run: RunDirectory) -> None:
    """Refuse a path that cannot be a run directory; changes nothing.

    Raises:
        ConfigError: a file, or a directory with somebody else's files.
    """
    path = run.path
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"--output-dir {path}: is a file; name a directory")
    if run.manifest.is_file():
        return
    # Another run may be making it this moment: the lock will tell.
    ours = (_LOCK, f".{run.manifest.name}.")
    if any(not entry.name.startswith(ours) for entry in path.iterdir()):
        raise ConfigError(
            f"--output-dir {path}: is not empty and has no manifest.json, so it is not a run "
            "of ours; name another directory"
        )


@contextmanager
def open_output_directory(
    run: RunDirectory, *, force: bool = False, private: bool = False
) -> Iterator[Manifest]:
    """Create or reopen a run directory and hold its lock.

    Args:
        run: the directory.
        force: reopen it also when another version of this program made it.
        private: keep other users out of it, and of what this process and those that it starts
            write until the end.

    Yields:
        Its manifest, which is on disk from here on.

    Raises:
        ConfigError: unusable as above, not writable, or in use.
    """
    check_output_directory(run)
    before = os.umask(0)
    os.umask(before | _OTHERS if private else before)
    try:
        with _locked(run, force, private) as manifest:
            yield manifest
    finally:
        os.umask(before)


@contextmanager
def _locked(run: RunDirectory, force: bool, private: bool) -> Iterator[Manifest]:
    """The directory and its lock, as `open_output_directory` has it."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        lock = (run.path / _LOCK).open("w")
    except OSError as error:
        raise ConfigError(
            f"--output-dir {run.path}: cannot be written: {error.strerror}; name another directory"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--output-dir {run.path}: another rlhf is running there; wait for it or name "
                "another directory"
            ) from None
        if private:
            _make_private(run.path)
        manifest = Manifest.load(run.manifest, force=force)
        if not run.manifest.is_file():
            manifest.save()
        yield manifest


def _make_private(directory: Path) -> None:
    """Takes the rights of others away, of what earlier runs left there as well.

    Links are not followed: what they point to is not ours.

    Raises:
        ConfigError: something in it belongs to another user.
    """
    for parent, _, files in os.walk(directory):
        for path in (Path(parent), *(Path(parent, name) for name in files)):
            if path.is_symlink() and path != directory:
                continue
            try:
                path.chmod(path.stat().st_mode & ~_OTHERS)
            except OSError as error:
                raise ConfigError(
                    f"private: {path}: {error.strerror}; name another --output-dir"
                ) from None
