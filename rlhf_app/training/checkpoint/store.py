"""Checkpoints of one stage on disk: whole or absent, and known to be what was written.

<stage>/checkpoints/latest                         name of the newest
<stage>/checkpoints/step_00000040/checkpoint.json  size and checksums of every other file
<stage>/checkpoints/step_00000040/rank0.pt         what only this rank knows
<stage>/checkpoints/step_00000040/<engine>/        DeepSpeed's own files

A checkpoint is written under another name. Its files are on the disk (fsync) before
`checkpoint.json` is, that before the directory gets its name, and that before `latest` says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhf_app.checksums import checksums
from rlhf_app.training.files import atomic_write_json, atomic_write_text, sync_directory

INDEX = "checkpoint.json"
LATEST = "latest"
_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ".new"

#: Name of a file in the checkpoint -> its bytes and its checksums (`rlhf_app.checksums`).
Files = dict[str, tuple[int, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What `checkpoint.json` says.

    Attributes:
        step: optimizer steps (PPO: updates) done.
        total_steps: how many there will be.
        world_size: processes that wrote it, and that can read it.
        files: all files but this one.
    """

    step: int
    total_steps: int
    world_size: int
    files: Files

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(size for size, _ in self.files.values())


class CheckpointStore:
    """The directory `<stage>/checkpoints`. Nothing here talks to other ranks.

    Args:
        directory: it need not exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def steps(self) -> list[int]:
        """Of the checkpoints with a name of their own, the newest first."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.directory / f"step_{step:08d}"

    def read(self, step: int) -> Checkpoint | None:
        """What it says of itself; None where that cannot be read."""
        try:
            values = json.loads((self.path(step) / INDEX).read_text(encoding="utf-8"))
            files = {
                str(name): (int(size), tuple(map(int, sums)))
                for name, (size, sums) in values["files"].items()
            }
            found = Checkpoint(values["step"], values["total_steps"], values["world_size"], files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return found if found.step == step and all(map(_is_inside, files)) else None

    def newest(self) -> Checkpoint | None:
        """The newest that can be read; its files are not looked at."""
        return next(filter(None, map(self.read, self.steps())), None)

    def damage(self, checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
        """What is wrong with some of its files, or None.

        Args:
            checkpoint: as read.
            names: of the files to look at, whole.
        """
        for name in names:
            size, sums = checkpoint.files[name]
            try:
                found = (self.path(checkpoint.step) / name).stat().st_size
                if found != size:
                    return f"{name} has {found:,} bytes instead of {size:,}"
                if checksums(self.path(checkpoint.step), {name: size})[name] != sums:
                    return f"{name} is not what was written"
            except OSError as error:
                return f"{name}: {error.strerror}"
        return None

    def begin(self, step: int) -> Path:
        """An empty directory in which to write the checkpoint of a step."""
        self.remove_unfinished()
        unfinished = self.unfinished(step)
        unfinished.mkdir(parents=True)
        return unfinished

    def unfinished(self, step: int) -> Path:
        """What `begin` makes."""
        return self.directory / f".step_{step:08d}{_UNFINISHED}"

    def finish(self, checkpoint: Checkpoint) -> None:
        """Give what `begin` made its name, now that all its files are on the disk."""
        source, target = self.unfinished(checkpoint.step), self.path(checkpoint.step)
        values = {
            "step": checkpoint.step,
            "total_steps": checkpoint.total_steps,
            "world_size": checkpoint.world_size,
            "files": checkpoint.files,
        }
        atomic_write_json(source / INDEX, values)
        for directory in {path.parent for path in source.rglob("*")}:
            sync_directory(directory)
        if target.exists():  # of the same step, before its evaluation
            replaced = self.directory / f".{target.name}.old"
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        source.rename(target)
        sync_directory(self.directory)
        atomic_write_text(self.directory / LATEST, target.name + "\n")
        self.remove_unfinished()

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, for people to look at; nothing takes it for one."""
        path, target = self.path(step), self.directory / f"damaged_{self.path(step).name}"
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
        return target

    def prune(self, keep: int, pinned: int | None = None) -> None:
        """Remove all but the newest `keep`, and the pinned one."""
        for step in self.steps()[keep:]:
            if step != pinned:
                # Without its index first: half of a checkpoint must not look like one.
                (self.path(step) / INDEX).unlink(missing_ok=True)
                shutil.rmtree(self.path(step), ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Remove what a killed run was writing, or was about to remove."""
        for path in self.directory.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self.directory, ignore_errors=True)


def describe_files(directory: Path, names: Iterable[str]) -> Files:
    """Puts files on the disk and says what is in them.

    Args:
        directory: of the checkpoint.
        names: relative to it.
    """
    sizes = {}
    for name in names:
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())
            sizes[name] = os.fstat(file.fileno()).st_size
    sums = checksums(directory, sizes)
    return {name: (size, sums[name]) for name, size in sizes.items()}


def files_in(directory: Path) -> list[str]:
    """Names of all files, relative to the directory, in one order."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(directory)) for path in paths)


def merged(parts: Iterable[Files]) -> Files:
    """The files of all ranks."""
    return {name: described for part in parts for name, described in part.items()}


def _is_inside(name: str) -> bool:
    """Whether a name stays in the directory that it is relative to."""
    return not os.path.isabs(name) and ".." not in Path(name).parts
