"""Checksums of large files, at the speed of memory: against bad disks, not against attackers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlhf_app.cores import own_cores

# Each is one piece of work for a thread: the largest file must not keep the others waiting.
_PART = 64 * 2**20
# Fits in a core's cache, so that the sum costs no second way to memory.
_BLOCK = 2**18
_MOST_THREADS = 8


def checksums(folder: Path, files: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """CRC-32 of the parts of files.

    Args:
        folder: where they lie.
        files: names, relative to it, and their bytes.

    Returns:
        Of each file one number for each 64 MiB, the last part being shorter.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    parts = [(name, at) for name, size in files.items() for at in range(0, size, _PART)]
    sums: dict[str, list[int]] = {name: [] for name in files}
    # zlib and the system let other threads run meanwhile.
    with ThreadPoolExecutor(max(1, min(own_cores(), _MOST_THREADS, len(parts)))) as pool:
        found = pool.map(lambda part: _sum(folder / part[0], part[1]), parts)
        for (name, _), value in zip(parts, found, strict=True):
            sums[name].append(value)
    return {name: tuple(values) for name, values in sums.items()}


def _sum(path: Path, start: int) -> int:
    block = memoryview(bytearray(_BLOCK))
    found, left = 0, _PART
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (number := file.readinto(block[: min(left, _BLOCK)])):
            found = zlib.crc32(block[:number], found)
            left -= number
    return found
