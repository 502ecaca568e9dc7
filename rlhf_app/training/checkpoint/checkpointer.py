"""Saves a running stage and brings it back, on all ranks together.

A checkpoint holds DeepSpeed's state of every engine (weights that train, fp32 masters,
moments, loss scale, schedule), and per rank the random generators and the `state_dict` of
everything else that remembers something. Data needs no state: which rows a step reads follows
from its number (`rlhf_app.training.batching`).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from rlhf_app.config.checkpoint import CheckpointConfig
from rlhf_app.errors import ConfigError, Interrupted
from rlhf_app.training import heartbeat
from rlhf_app.training.checkpoint.random_state import random_state, set_random_state
from rlhf_app.training.checkpoint.requests import Request, Requests
from rlhf_app.training.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    Files,
    describe_files,
    files_in,
    merged,
)
from rlhf_app.training.distributed import Dist
from rlhf_app.training.safe_load import refused_files

log = logging.getLogger(__name__)

# Of a trained parameter: weights, fp32 master, two moments, and as much again for an average.
_BYTES_PER_PARAMETER = 16
_RESERVE = 64 << 20  # logs and metrics must still fit


class Stateful(Protocol):
    """What has something to remember: tensors, numbers, strings, and containers of them."""

    def state_dict(self) -> Mapping[str, Any]:
        """All of it, for `load_state_dict`."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from what `state_dict` returned."""


class Checkpointer:
    """The checkpoints of one stage.

    Args:
        settings: when, and how many.
        directory: `<stage>/checkpoints`.
        requests: file in which the controller leaves its requests.
        dist: this process's place.
        total_steps: of the stage.
        engines: DeepSpeed engines by name.
        state: everything else by name. Ranks may differ in what it holds.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        directory: Path,
        requests: Path,
        dist: Dist,
        *,
        total_steps: int,
        engines: Mapping[str, Any],
        state: Mapping[str, Stateful],
    ) -> None:
        self._settings = settings
        self._store = CheckpointStore(directory)
        self._requests = Requests(requests)
        self._dist = dist
        self._total_steps = total_steps
        self._engines = dict(engines)
        self._state = dict(state)
        self._written_at = time.monotonic()
        self._bytes = 0
        self._pinned: int | None = None
        self._saved = 0

    def resume(self) -> int:
        """Goes on from the newest whole checkpoint; a damaged one is set aside, with a warning.

        Call it last before training: it also restores the random generators, and from now on
        requests are taken.

        Returns:
            Steps done; 0 without a checkpoint.

        Raises:
            ConfigError: it was written by another number of processes.
        """
        self._requests.listen()
        heartbeat.watch()
        while True:
            steps = self._dist.gather_objects(self._store.steps())[0]
            if not steps:
                return 0
            checkpoint = self._store.read(steps[0])
            trouble = self._trouble(checkpoint)
            if trouble is None and checkpoint is not None:
                break
            if self._dist.is_main:
                kept = self._store.set_aside(steps[0])
                before = f"step {steps[1]}" if len(steps) > 1 else "the beginning"
                log.warning(
                    "the checkpoint of step %d is damaged (%s): it is left in %s and training goes "
                    "on from %s",
                    *(steps[0], trouble, kept, before),
                )
            self._dist.barrier()
        if checkpoint.world_size != self._dist.world_size:
            raise ConfigError(
                f"{self._store.path(checkpoint.step)}: was written by {checkpoint.world_size} "
                f"processes and this run has {self._dist.world_size}: set "
                f"deployment.num_processes to {checkpoint.world_size}, or use --force to begin anew"
            )
        began = time.monotonic()
        self._load(self._store.path(checkpoint.step))
        self._bytes, self._saved = checkpoint.num_bytes, checkpoint.step
        if self._dist.is_main:
            self._store.remove_unfinished()
        log.info(
            "goes on after step %d of %d: %s read in %.1f s",
            *(checkpoint.step, self._total_steps, _size(checkpoint.num_bytes)),
            time.monotonic() - began,
        )
        self._written_at = time.monotonic()
        return checkpoint.step

    def after(self, step: int, *, last: bool = False) -> None:
        """Writes a checkpoint if it is time to. Every rank must call, after every step.

        Args:
            step: steps done.
            last: no other follows.

        Raises:
            Interrupted: the stage was asked to stop. It says from which checkpoint it goes on.
        """
        heartbeat.beat(f"after step {step}")
        asked = self._requests.take()
        flags = [self._is_due(step, last) or asked >= Request.CHECKPOINT, asked == Request.STOP]
        due, stop = self._dist.sum([float(flag) for flag in flags])
        if due:
            self._write(step)
        if stop:
            raise Interrupted(step, self._total_steps, saved=self._saved)

    def pin(self, step: int) -> None:
        """Writes a checkpoint of the best weights so far, which stays until others are better.

        Call it before their artifact is written: whatever happens then, it can be written again
        from here. Nothing where the settings ask for no checkpoints.
        """
        if self._settings.enabled:
            self._pinned = step
            self._write(step)

    def _write(self, step: int) -> None:
        """Writes a checkpoint now, on every rank; where that cannot be, only a warning."""
        heartbeat.beat("checkpoint")
        began = time.monotonic()
        self._written_at = began
        trouble = self._prepare(step)
        if trouble is not None:
            log.warning("no checkpoint of step %d: %s", step, trouble)
            return
        unfinished = self._store.unfinished(step)
        try:
            files = self._write_files(unfinished)
            checkpoint = Checkpoint(step, self._total_steps, self._dist.world_size, files)
            if self._dist.is_main:
                self._store.finish(checkpoint)
                self._store.prune(self._settings.keep, self._pinned)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            # Other ranks wait for one that stops here, so that only a single one can go on.
            if self._dist.world_size > 1 or not isinstance(error, OSError | RuntimeError):
                raise
            log.warning("no checkpoint of step %d: %s", step, str(error).splitlines()[0])
            return
        self._bytes, self._saved = checkpoint.num_bytes, step
        self._dist.barrier()
        log.info(
            "checkpoint of step %d of %d: %s in %.1f s",
            *(step, self._total_steps, _size(checkpoint.num_bytes), time.monotonic() - began),
        )
        self._written_at = time.monotonic()

    def _is_due(self, step: int, last: bool) -> bool:
        every = self._settings
        if last:
            return every.at_end
        if every.every_steps is not None and step % every.every_steps == 0:
            return True
        if every.every_minutes is None or not self._dist.is_main:
            return False  # it is the main process's clock that counts, and `after` tells the others
        return time.monotonic() - self._written_at >= 60 * every.every_minutes

    def _prepare(self, step: int) -> str | None:
        """Makes room and a directory; why there is none, or None. The same on all ranks."""
        found = None
        if self._dist.is_main:
            try:
                found = self._make_room()
                if found is None:
                    self._store.begin(step)
            except OSError as error:
                found = f"{error.filename}: {error.strerror}"
        return self._dist.gather_objects(found)[0]

    def _make_room(self) -> str | None:
        """Older checkpoints make room for one more, but for the newest; or what is wrong."""
        wanted = int(self._bytes or self._estimate())
        self._store.directory.mkdir(parents=True, exist_ok=True)
        if self._free() < wanted + _RESERVE:
            self._store.prune(1, self._pinned)
        if self._free() >= wanted + _RESERVE:
            return None
        return (
            f"it takes about {_size(wanted)} and leaves {_size(_RESERVE)} alone, and "
            f"{self._store.directory} has {_size(self._free())}; free space"
        )

    def _free(self) -> int:
        return shutil.disk_usage(self._store.directory).free

    def _estimate(self) -> int:
        """Bytes of the first checkpoint; later ones are as large as the last."""
        trained = sum(
            getattr(parameter, "ds_numel", parameter.numel())
            for engine in self._engines.values()
            for parameter in engine.module.parameters()
            if parameter.requires_grad
        )
        return int(trained * _BYTES_PER_PARAMETER)

    def _write_files(self, directory: Path) -> Files:
        for name, engine in self._engines.items():
            # What is frozen comes from where it came from the first time.
            engine.save_checkpoint(
                str(directory), tag=name, save_latest=False, exclude_frozen_parameters=True
            )
        own = {
            "random": random_state(),
            "pinned": self._pinned,
            "state": {name: part.state_dict() for name, part in self._state.items()},
        }
        torch.save(own, directory / _rank_file(self._dist.rank))
        self._dist.barrier()
        names = self._dist.gather_objects(files_in(directory))[0]
        mine = names[self._dist.rank :: self._dist.world_size]
        return merged(self._dist.gather_objects(describe_files(directory, mine)))

    def _trouble(self, checkpoint: Checkpoint | None) -> str | None:
        """What is wrong with a checkpoint, found by all ranks together; the same on all."""
        found: str | None = "checkpoint.json is missing or damaged"
        if checkpoint is not None:
            mine = sorted(checkpoint.files)[self._dist.rank :: self._dist.world_size]
            found = self._store.damage(checkpoint, mine)
        return next(filter(None, self._dist.gather_objects(found)), None)

    def _load(self, directory: Path) -> None:
        for name, engine in self._engines.items():
            with refused_files(f"checkpoint {directory}"):
                path, _ = engine.load_checkpoint(str(directory), tag=name, load_module_strict=False)
            assert path is not None, f"DeepSpeed did not load {directory / name}"
        file = directory / _rank_file(self._dist.rank)
        with refused_files(f"checkpoint {directory}"):
            own = torch.load(file, map_location="cpu", weights_only=True)
        for name, part in self._state.items():
            part.load_state_dict(own["state"][name])
        self._pinned = own["pinned"]
        set_random_state(own["random"])


def _rank_file(rank: int) -> str:
    return f"rank{rank}.pt"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
