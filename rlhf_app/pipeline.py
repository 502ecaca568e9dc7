"""The controller of a run: settings in, finished stages out.

    settings -> run directory -> (embedded model and data) -> checks -> per stage: reuse it, or
    fresh worker processes -> manifest -> summary and final table

Each stage runs in processes of its own, so its memory is really free before the next starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rlhf_app.config.hidden import hidden_settings
from rlhf_app.config.load import Resolved, with_values
from rlhf_app.config.schema import DeploymentConfig, RunConfig, StageName
from rlhf_app.config.yaml_files import dump_config
from rlhf_app.deployment.launch import worker_argv, worker_environment
from rlhf_app.deployment.progress import clock
from rlhf_app.deployment.supervise import run_workers
from rlhf_app.deployment.topology import Topology, check_topology, count_gpus, plan_topology
from rlhf_app.deployment.worker_lock import wait_until_free
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
from rlhf_app.output_directory import open_output_directory
from rlhf_app.preflight import check_inputs, check_named, check_sizes
from rlhf_app.report.final_table import print_final_table
from rlhf_app.report.summary import collect_summary, write_summary
from rlhf_app.reuse import Decision, check_nothing_needed_is_removed, decide
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training.checkpoint.store import CheckpointStore
from rlhf_app.training.clock import LAUNCHED, TIMEOUT_MINUTES

if TYPE_CHECKING:
    from data_sources.embedded import EmbeddedTask


_FULL_DISK = 1 << 20


def run_pipeline(resolved: Resolved, *, force: bool, console: Console) -> None:
    """Run the chosen stages, or reuse those that are finished and unchanged.

    Args:
        resolved: the settings and how they came about.
        force: redo stages that changed, and all after them.
        console: where progress and the final table go.

    Raises:
        ConfigError: bad input; nothing was started, or the worker that found it says so.
        StageFailed: a worker failed.
        Interrupted: the run was asked to stop, and everything that it needs to go on is saved.
        KeyboardInterrupt: the run was interrupted; its workers are gone.
    """
    config = resolved.config
    gpus = count_gpus() if config.deployment.type != "cpu" else 0
    topology = plan_topology(config.deployment, gpus)
    check_topology(topology, gpus)
    check_sizes(config, topology.num_processes)
    run = RunDirectory(config.output_dir)
    if resolved.embedded:
        check_named(config)
    else:
        check_inputs(config, run)
    with open_output_directory(run, force=force, private=config.private) as manifest:
        wait_until_free(run)
        if resolved.embedded:
            _check_seed(config, run, manifest, force)
            config = use_embedded_default(config, run, console)
            check_inputs(config, run)
        config = with_values(
            config,
            {
                "deployment.type": topology.type,
                "deployment.num_processes": topology.num_processes,
            },
        )
        decisions = decide(config, run, manifest, force=force)
        check_nothing_needed_is_removed(config, run, decisions)
        # What stays must be readable: the summary at the end is the wrong time to find out.
        redone = [decision.stage for decision in decisions if decision.action != "reuse"]
        collect_summary(run, without=redone)
        _check_data(config, redone)
        _write_config(config, run)
        for decision in decisions:
            if decision.action == "reuse":
                _say(console, f"{decision.stage}: reused, unchanged")
        for decision in decisions:
            if decision.action == "run":
                # Dropped before the first starts: an interrupted redo must not leave stale ones.
                manifest.drop(decision.stage)
        for decision in decisions:
            if decision.action != "reuse":
                _run_stage(config, run, manifest, decision, topology, console)
        summary = write_summary(run)
        print_final_table(console, run, summary)


def use_embedded_default(config: RunConfig, run: RunDirectory, console: Console) -> RunConfig:
    """Build the built-in model and task, and point the settings at them.

    A gold scorer that the user named stays.
    """
    # Here, not at the top: the library knows no data source, and building imports torch.
    from data_sources.embedded import prepare

    _say(console, f"no --actor-model and no data: the built-in model and task in {run.embedded}")
    with quiet_libraries():
        task = prepare(run.embedded, config.seed)
    return _with_task(config, task)


def built_default(config: RunConfig) -> RunConfig | None:
    """The settings pointed at the built-in model and task, or None where they are not built."""
    from data_sources.embedded import find

    task = find(RunDirectory(config.output_dir).embedded)
    return None if task is None else _with_task(config, task)


def _with_task(config: RunConfig, task: EmbeddedTask) -> RunConfig:
    return with_values(
        config,
        {
            "model.actor": str(task.actor),
            "data.sft": [{"path": str(task.sft)}],
            "data.reward": [{"path": str(task.pairs)}],
            "data.ppo": [{"path": str(task.prompts)}],
            "data.eval": [{"path": str(task.evaluation)}],
            "gold.scorer": config.gold.scorer or task.gold,
        },
    )


def _check_data(config: RunConfig, stages: Sequence[StageName]) -> None:
    """Each stage must have rows: the third would find out after the work of two."""
    # Here, not at the top: reading data takes libraries that a reused run does not need.
    from data_sources.stage_check import check_stage_data

    if stages:
        check_stage_data(config, stages)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep import-time warnings and progress bars of libraries off the user's screen.

    Errors are exceptions and come through.
    """
    logging.disable(logging.WARNING)
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _check_seed(config: RunConfig, run: RunDirectory, manifest: Manifest, force: bool) -> None:
    """Another seed means other embedded data: say so before the old data is replaced."""
    for stage, record in manifest.stages.items():
        old = record.settings.get("seed")
        if record.status == "finished" and old != config.seed and not force:
            raise ConfigError(
                f"{run.stage(stage)} is finished, but would change: seed {old} -> {config.seed}; "
                "use --force to redo it and the stages after it, or another --output-dir"
            )


def _run_stage(
    config: RunConfig,
    run: RunDirectory,
    manifest: Manifest,
    decision: Decision,
    topology: Topology,
    console: Console,
) -> None:
    """Start one stage, from nothing or from its checkpoint, and record how it ended."""
    stage = decision.stage
    if decision.action == "resume":
        _tidy_up(run, stage)
        checkpoint = CheckpointStore(run.checkpoints(stage)).newest()
        if checkpoint is not None:
            steps = f"step {checkpoint.step} of {checkpoint.total_steps}"
            _say(console, f"{stage}: goes on from its checkpoint, after {steps}")
    else:
        # What a killed or forced stage left is half done: no part of it may be taken for the new.
        _remove_directory(run.stage(stage))
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
    _say(console, f"{stage}: {workers}, log: {run.log(stage, 0)}")
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
    _say(console, f"{stage}: finished in {clock(done.finished - done.started)}")
    if asked_to_stop:
        result = json.loads(run.result(stage).read_text(encoding="utf-8"))
        steps = result.get("steps", result.get("updates", 0))
        raise Interrupted(steps, steps)


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


def _remove_directory(path: Path) -> None:
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


def _write_config(config: RunConfig, run: RunDirectory) -> None:
    temporary = run.config.with_suffix(".tmp")
    temporary.write_text(dump_config(config), encoding="utf-8")
    os.replace(temporary, run.config)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
