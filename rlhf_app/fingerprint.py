"""Hashes of files and directories, to tell whether an input is still the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlhf_app.home import expanded

WHOLE_FILE_LIMIT = 256 * 2**20
_BLOCK = 2**20
_SAMPLES = 64


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal.

    Files beyond 256 MiB (weights) are represented by their size and 64 evenly spaced blocks of
    1 MiB: reading a 70B model whole before every run would take minutes.

    Args:
        path: an existing file.
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_FILE_LIMIT:
            while block := file.read(_BLOCK):
                digest.update(block)
        else:
            digest.update(str(size).encode())
            for index in range(_SAMPLES):
                file.seek(index * (size - _BLOCK) // (_SAMPLES - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def tree_hash(directory: Path) -> str:
    """SHA-256 over the relative names and contents of all files below a directory."""
    digest = hashlib.sha256()
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(directory).as_posix()}\0{file_hash(path)}\0".encode())
    return digest.hexdigest()


def content_hash(name: str) -> str:
    """Hash of a local file or directory; a Hub id stands for itself.

    Args:
        name: path or Hub id.
    """
    path = expanded(name)
    if path.is_dir():
        return tree_hash(path)
    if path.is_file():
        return file_hash(path)
    return f"hub:{name}"
