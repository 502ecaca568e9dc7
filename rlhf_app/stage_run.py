"""One stage of a run: its processes from nothing or from a checkpoint, and how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

from rich.console import Console

from rlhf_app.config.hidden import hidden_settings
from rlhf_app.config.schema import DeploymentConfig, RunConfig, StageName
from rlhf_app.deployment.launch import worker_argv, worker_environment
from rlhf_app.deployment.progress import clock
from rlhf_app.deployment.supervise import run_workers
from rlhf_app.deployment.topology import Topology
from rlhf_app.errors import ConfigError, Interrupted, StageFailed
from rlhf_app.fingerprint import content_hash
from rlhf_app.manifest import (
    Manifest,
    StageRecord,
    git_revision,
    stage_fingerprints,
    stage_settings,
    versions,
)
from rlhf_app.reuse import Decision
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training.checkpoint.store import CheckpointStore
from rlhf_app.training.clock import LAUNCHED, TIMEOUT_MINUTES

_FULL_DISK = 1 << 20


def run_stage(
    config: RunConfig,
    run: RunDirectory,
    manifest: Manifest,
    decision: Decision,
    topology: Topology,
    console: Console,
) -> None:
    """Start one stage, from nothing or from its checkpoint, and record how it ended.

    Args:
        config: the run's settings.
        run: its directory, whose lock is held.
        manifest: is told of every change.
        decision: about the stage; not to reuse it.
        topology: number of processes, and their device.
        console: where progress goes.

    Raises:
        ConfigError: a worker found bad input.
        StageFailed: a worker failed; the message says what can be done.
        Interrupted: the stage was asked to stop, and its checkpoint is written.
        KeyboardInterrupt: its workers were ended at once.
    """
    stage = decision.stage
    if decision.action == "resume":
        _tidy_up(run, stage)
        checkpoint = CheckpointStore(run.checkpoints(stage)).newest()
        if checkpoint is not None:
            steps = f"step {checkpoint.step} of {checkpoint.total_steps}"
            say(console, f"{stage}: goes on from its checkpoint, after {steps}")
    else:
        # What a killed or forced stage left is half done: no part of it may be taken for the new.
        remove_directory(run.stage(stage))
    run.logs(stage).mkdir(parents=True, exist_ok=True)
    record = StageRecord(
        status="running",
        settings=stage_settings(config, stage),
        inputs=stage_fingerprints(config, run, stage),
        started=time.time(),
        versions=versions(),
        git=git_revision(),
    )
    manifest.put(stage, record)
    count = topology.num_processes
    workers = f"{count} process{'es' * (count > 1)} on {topology.device}"
    say(console, f"{stage}: {workers}, log: {run.log(stage, 0)}")
    try:
        asked_to_stop = run_workers(
            worker_argv(topology, run.path, stage),
            worker_environment(topology, os.environ)
            | hidden_settings(config)
            | _timing(config.deployment),
            run,
            stage,
            count,
            console,
            hang_minutes=config.deployment.hang_minutes,
        )
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk: what failed is the news, not this
            manifest.put(stage, dataclasses.replace(record, status="failed", finished=time.time()))
        if isinstance(error, StageFailed):
            raise StageFailed(f"{error}{_what_now(run, stage)}") from error
        raise
    done = dataclasses.replace(
        record,
        status="finished",
        finished=time.time(),
        artifact_hash=content_hash(str(run.artifact(stage))),
    )
    manifest.put(stage, done)
    if not config.checkpoint.keep_finished:
        CheckpointStore(run.checkpoints(stage)).remove()
    say(console, f"{stage}: finished in {clock(done.finished - done.started)}")
    if asked_to_stop:
        result = json.loads(run.result(stage).read_text(encoding="utf-8"))
        steps = result.get("steps", result.get("updates", 0))
        raise Interrupted(steps, steps, saved=steps)


def _what_now(run: RunDirectory, stage: StageName) -> str:
    """What else there is to say about a stage that failed."""
    text = ""
    free = shutil.disk_usage(run.path).free
    if free < _FULL_DISK:  # the reason itself may have found no room in the log
        text += f". No space left on device: {run.path} has {free >> 10} KiB left; free some"
    checkpoint = CheckpointStore(run.checkpoints(stage)).newest()
    if checkpoint is not None:
        text += (
            f". The same command goes on after step {checkpoint.step} of {checkpoint.total_steps}"
        )
    return text


def _timing(deployment: DeploymentConfig) -> dict[str, str]:
    """When the workers were asked for, and how long they wait for each other."""
    minutes = max(30.0, (deployment.hang_minutes or 24 * 60) + 5)
    return {LAUNCHED: str(time.time()), TIMEOUT_MINUTES: f"{minutes:g}"}


def _tidy_up(run: RunDirectory, stage: StageName) -> None:
    """Removes what an interrupted stage said about its end, and what it was writing then."""
    directory = run.stage(stage)
    notes = [run.request(stage), run.interrupted(stage), run.warnings(stage), run.result(stage)]
    for path in (*notes, *directory.glob("error_rank*.json"), run.launcher_log(stage)):
        path.unlink(missing_ok=True)
    leftovers = (*directory.glob(".*.new"), *directory.glob(".*.old"))
    for path in (run.heartbeats(stage), *leftovers):
        shutil.rmtree(path, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory; of a symbolic link only the link, since its target is not ours."""
    try:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be removed: {error.strerror}; use another --output-dir"
        ) from None


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
