"""The controller of a run: settings in, finished stages out.

    settings -> run directory -> (embedded model and data) -> checks -> per stage: reuse it, or
    fresh worker processes -> manifest -> summary and final table

Each stage runs in processes of its own, so its memory is really free before the next starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rlhf_app.config.load import Resolved, with_values
from rlhf_app.config.schema import RunConfig, StageName
from rlhf_app.config.yaml_files import dump_config
from rlhf_app.deployment.topology import check_topology, count_gpus, plan_topology
from rlhf_app.deployment.worker_lock import wait_until_free
from rlhf_app.errors import ConfigError
from rlhf_app.manifest import (
    Manifest,
)
from rlhf_app.output_directory import open_output_directory
from rlhf_app.preflight import check_inputs, check_named, check_sizes
from rlhf_app.report.final_table import print_final_table
from rlhf_app.report.summary import collect_summary, write_summary
from rlhf_app.reuse import check_nothing_needed_is_removed, decide
from rlhf_app.run_directory import RunDirectory
from rlhf_app.stage_run import run_stage, say
from rlhf_app.training.checkpoint.store import CheckpointStore
from rlhf_app.training.files import atomic_write_text

if TYPE_CHECKING:
    from data_sources.embedded import EmbeddedTask


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
        atomic_write_text(run.config, dump_config(config))
        for decision in decisions:
            if decision.action == "reuse":
                say(console, f"{decision.stage}: reused, unchanged")
        for decision in decisions:
            if decision.action == "run":
                # Dropped before the first starts: an interrupted redo must not leave stale ones.
                manifest.drop(decision.stage)
        for decision in decisions:
            if decision.action != "reuse":
                run_stage(config, run, manifest, decision, topology, console)
        summary = write_summary(run)
        print_final_table(console, run, summary)


def use_embedded_default(config: RunConfig, run: RunDirectory, console: Console) -> RunConfig:
    """Build the built-in model and task, and point the settings at them.

    A gold scorer that the user named stays.
    """
    # Here, not at the top: the library knows no data source, and building imports torch.
    from data_sources.embedded import prepare

    say(console, f"no --actor-model and no data: the built-in model and task in {run.embedded}")
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
        begun = record.status == "finished" or CheckpointStore(run.checkpoints(stage)).steps()
        if begun and old != config.seed and not force:
            state = "is finished" if record.status == "finished" else "has a checkpoint"
            raise ConfigError(
                f"{run.stage(stage)} {state}, but would change: seed {old} -> {config.seed}; "
                "use --force to redo it and the stages after it, or another --output-dir"
            )
