"""Takes possession of a run directory: ours or empty, writable, and used by one run only."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_app.errors import ConfigError
from rlhf_app.manifest import Manifest
from rlhf_app.run_directory import RunDirectory

_LOCK = ".lock"


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
    if any(entry.name != _LOCK for entry in path.iterdir()):
        raise ConfigError(
            f"--output-dir {path}: is not empty and has no manifest.json, so it is not a run "
            "of ours; name another directory"
        )


@contextmanager
def open_output_directory(run: RunDirectory, *, force: bool = False) -> Iterator[Manifest]:
    """Create or reopen a run directory and hold its lock.

    Args:
        run: the directory.
        force: reopen it also when another version of this program made it.

    Yields:
        Its manifest, which is on disk from here on.

    Raises:
        ConfigError: unusable as above, not writable, or in use.
    """
    check_output_directory(run)
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
        manifest = Manifest.load(run.manifest, force=force)
        if not run.manifest.is_file():
            manifest.save()
        yield manifest
