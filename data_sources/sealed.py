"""The seal of a directory that never changes: checksums of its files, and of the seal itself.

Damage that keeps the sizes (a bad disk, a copy that went wrong) has other checksums. CRC-32 is
no protection against an attacker: whoever can write to the directory can write a seal.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_app.checksums import checksums

#: The file with the checksums, and one that is touched whenever the directory is opened.
SEAL = "seal.json"
USED = "used"
# Of every file what changes whenever it is written to: size, times, inode.
_States = dict[str, tuple[int, ...]]
# What this process has found whole.
_known: dict[Path, _States] = {}


class Damaged(ValueError):
    """A directory is not what was sealed."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What was written when a directory was finished.

    Attributes:
        name: of the directory.
        about: what it was made of, in words.
        files: of each file the bytes, and the CRC-32 of each 64 MiB.
    """

    name: str
    about: str
    files: Mapping[str, tuple[int, tuple[int, ...]]]


def seal(folder: Path, name: str, about: str) -> None:
    """Writes the seal of a directory whose files are finished.

    Args:
        folder: the directory, which may still have another name.
        name: that it will have.
        about: what it was made of, in words.

    Raises:
        OSError: it cannot be written.
    """
    (folder / USED).touch()
    files = {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.name not in (SEAL, USED)
    }
    sums = checksums(folder, files)
    facts = {
        "name": name,
        "about": about,
        "files": [[file, size, sums[file]] for file, size in files.items()],
    }
    with (folder / SEAL).open("w", encoding="utf-8") as sheet:
        json.dump({"crc32": _own(facts), "sealed": facts}, sheet)
        sheet.flush()
        os.fsync(sheet.fileno())


def read_seal(folder: Path) -> Seal:
    """Returns the seal of a directory.

    Raises:
        OSError: there is none, or it cannot be read.
        Damaged: it is not as it was written.
    """
    path = folder / SEAL
    try:
        sheet = json.loads(path.read_text(encoding="utf-8"))
        facts = sheet["sealed"]
        if sheet["crc32"] != _own(facts):
            raise Damaged(f"{SEAL} is not as it was written")
        files = {str(name): (int(size), tuple(sums)) for name, size, sums in facts["files"]}
        return Seal(facts["name"], facts["about"], files)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{SEAL} is not as it was written") from error


def check(folder: Path) -> None:
    """Makes sure that a directory is what was sealed.

    What this process has found whole is not read again while no file is written to.

    Args:
        folder: the directory.

    Raises:
        OSError: a file is missing or cannot be read.
        Damaged: a file has other content.
    """
    found = read_seal(folder)
    if found.name != folder.name:
        raise Damaged(f"it was made as {found.name}")
    before = _states(folder, found)
    if _known.get(folder) == before:
        return
    _known.pop(folder, None)
    files = {name: size for name, (size, _) in found.files.items()}
    for name, size in files.items():
        state = os.stat(folder / name)
        if not stat.S_ISREG(state.st_mode) or state.st_size != size:
            raise Damaged(f"{name} is not {size} bytes long")
    for name, sums in checksums(folder, files).items():
        if sums != found.files[name][1]:
            raise Damaged(f"{name} has another checksum than when it was written")
    if _states(folder, found) == before:  # else it is being written to
        _known[folder] = before


def _states(folder: Path, found: Seal) -> _States:
    states: _States = {}
    for name in (*found.files, SEAL):
        state = os.stat(folder / name)
        times = (state.st_mtime_ns, state.st_ctime_ns)
        states[name] = (state.st_size, *times, state.st_ino, state.st_dev)
    return states


def _own(facts: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode("ascii"))
