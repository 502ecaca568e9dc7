"""Files and directories that are either whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def atomic_write_json(path: Path, value: Any) -> None:
    """Writes JSON beside the target and renames it: a reader never sees half of it.

    Args:
        path: the file; its directory is created.
        value: anything that JSON can hold.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold; nothing is written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, text + "\n")


def atomic_write_text(path: Path, text: str) -> None:
    """Writes a file beside the target and renames it: a reader never sees half of it.

    Args:
        path: the file; its directory must exist.
        text: what is to be in it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Puts the names in a directory on the disk: a rename before it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(directory: Path) -> None:
    """Puts all files of a directory on the disk, and their names."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for inner in {directory, *(path.parent for path in directory.rglob("*"))}:
        sync_directory(inner)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory that takes the target's place when the block succeeds.

    An existing target is replaced only then; on an exception it stays as it was.

    Args:
        path: the directory to create or replace.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _open_to_readers(temporary)
        sync_files(temporary)
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _open_to_readers(directory: Path) -> None:
    """Give every file the mode that the user's umask asks for.

    Some writers of safetensors create files for their owner alone, so that a server running
    as somebody else could read the config but not the weights.
    """
    umask = os.umask(0)
    os.umask(umask)
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)
