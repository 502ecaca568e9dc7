"""Decides for each stage of a run: do it, or reuse what is finished. Never guesses.

A finished stage is reused only if its settings and the content of its inputs are the same.
Otherwise the run stops and says what changed; `--force` does it and the later ones again.
An unfinished stage goes on from its checkpoint under the same condition.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_app.config.functions import function_file
from rlhf_app.config.rewards import uses_model
from rlhf_app.config.schema import STAGES, RunConfig, StageName
from rlhf_app.data_paths import has_wildcards, matching_files
from rlhf_app.errors import ConfigError
from rlhf_app.fingerprint import content_hash
from rlhf_app.home import expanded
from rlhf_app.manifest import Manifest, StageRecord, stage_fingerprints, stage_settings
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training.checkpoint.store import Checkpoint, CheckpointStore

Action = Literal["run", "resume", "reuse"]
_MOST_SHOWN = 3
_LONGEST_VALUE = 60
# A run that ran out of memory may go on with other values of these: they change no result but
# for the order of sums.
_SPEED_ALONE = (
    "micro_batch_size",
    "micro_batch_tokens",
    "score_batch_tokens",
    "gradient_checkpointing",
    "release_inference_cache",
    "pin_parameters",
    "enable_cuda_graph",
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one stage.

    Attributes:
        stage: its name.
        action: run from the beginning, resume from a checkpoint, or reuse what is finished.
    """

    stage: StageName
    action: Action


def decide(
    config: RunConfig, run: RunDirectory, manifest: Manifest, *, force: bool
) -> list[Decision]:
    """Decide about all stages of a run before the first one starts.

    Args:
        config: the run's settings.
        run: its directory.
        manifest: what is finished there.
        force: redo stages that changed and all after them; where nothing changed, redo all.

    Raises:
        ConfigError: a finished stage would come out differently now, and `force` is off.
    """
    _check_upstream(config, run, manifest)
    decisions: list[Decision] = []
    redo = False
    for stage in config.stages:
        record = manifest.stages.get(stage)
        made_anew = any(decision.action != "reuse" for decision in decisions)
        if redo or record is None or not _is_finished(run, stage, record):
            resumable = not (redo or record is None or force)
            store = CheckpointStore(run.checkpoints(stage))
            checkpoint = store.newest() if resumable else None
            if checkpoint is not None and record is not None:
                _check_resume(config, run, stage, record, checkpoint, made_anew=made_anew)
            # Where all are damaged the stage begins anew, but nothing of them is removed.
            going_on = resumable and store.steps()
            decisions.append(Decision(stage, "resume" if going_on else "run"))
            continue
        changes = (
            ["an earlier stage is not finished"]
            if made_anew
            else differences(config, run, stage, record)
        )
        if changes and not force:
            raise ConfigError(
                f"{run.stage(stage)} is finished, but would change: {_some(changes)}"
                + "; use --force to redo it and the stages after it, or another --output-dir"
            )
        redo = bool(changes)
        decisions.append(Decision(stage, "run" if redo else "reuse"))
    if force and all(decision.action == "reuse" for decision in decisions):
        return [Decision(stage, "run") for stage in config.stages]
    return decisions


def _check_resume(
    config: RunConfig,
    run: RunDirectory,
    stage: StageName,
    record: StageRecord,
    checkpoint: Checkpoint,
    *,
    made_anew: bool,
) -> None:
    """Hours of work are not thrown away because a setting has changed: that is said first."""
    if made_anew:
        changes = ["an earlier stage is not finished"]
    else:
        changes = [
            change
            for change in differences(config, run, stage, record)
            if not change.partition(" ")[0].endswith(_SPEED_ALONE)
        ]
        processes = config.deployment.num_processes or 1
        if checkpoint.world_size != processes:
            changes.append(f"number of processes {checkpoint.world_size} -> {processes}")
    if changes:
        raise ConfigError(
            f"{run.stage(stage)} has a checkpoint of step {checkpoint.step} of "
            f"{checkpoint.total_steps}, which does not fit: {_some(changes)}; restore that to go "
            "on, use --force to begin the stage anew, or another --output-dir"
        )


def check_nothing_needed_is_removed(
    config: RunConfig, run: RunDirectory, decisions: Iterable[Decision]
) -> None:
    """A stage that runs starts from an empty directory: no input of the user may lie in it.

    Args:
        config: the run's settings.
        run: its directory.
        decisions: what happens to the stages.

    Raises:
        ConfigError: names the flag and the path.
    """
    for decision in decisions:
        if decision.action == "run":
            removed = run.stage(decision.stage)
            for flag, name in _named_inputs(config):
                if _lies_in(expanded(name), removed):
                    raise ConfigError(
                        f"{flag} {name}: lies in {removed}, which this run empties before the "
                        f"stage {decision.stage}; copy it elsewhere or use another --output-dir"
                    )


def _named_inputs(config: RunConfig) -> list[tuple[str, str]]:
    """Flag and path of every model, data source and scorer file that the user named."""
    data = config.data
    named = [
        ("--actor-model", config.model.actor or ""),
        ("--reward-model", config.model.reward or ""),
        ("--gold", function_file(config.gold.scorer or "")),
        ("data.chat_template", data.chat_template or ""),
    ]
    for source in config.ppo.rewards:
        named.append(("--reward-source", source.local_path))
    for flag, sources in (
        ("--data", data.sources),
        ("--sft-data", data.sft),
        ("--reward-data", data.reward),
        ("--ppo-data", data.ppo),
        ("--eval-data", data.eval),
        ("ppo.ptx_data", config.ppo.ptx_data),
    ):
        for data_source in sources:
            paths = [data_source.path, data_source.normaliser_file]
            if has_wildcards(data_source.path):
                paths += map(str, matching_files(data_source.path))
            named += [(flag, path) for path in paths]
    return [(flag, name) for flag, name in named if name]


def _lies_in(path: Path, directory: Path) -> bool:
    """Whether an existing path is in a directory, as written or behind symbolic links."""
    if not path.exists():
        return False
    # A link that is the directory itself is removed too, with the paths that lead through it.
    outer = {directory.parent.resolve() / directory.name, directory.resolve()}
    inner = {path.parent.resolve() / path.name, path.resolve(), Path(os.path.abspath(path))}
    outer.add(Path(os.path.abspath(directory)))
    return any(one.is_relative_to(other) for one in inner for other in outer)


def differences(
    config: RunConfig, run: RunDirectory, stage: StageName, record: StageRecord
) -> list[str]:
    """What differs between a stage as it was begun and the present settings and inputs.

    Of a finished one also whether its artifact is as it was.
    """
    changes = []
    settings = stage_settings(config, stage)
    for key in sorted(settings.keys() | record.settings.keys()):
        old, new = record.settings.get(key), settings.get(key)
        if old != new:
            changes.append(f"{key} {_short(old)} -> {_short(new)}")
    inputs = stage_fingerprints(config, run, stage)
    for name in sorted(inputs.keys() | record.inputs.keys()):
        old_hash, new_hash = record.inputs.get(name), inputs.get(name)
        if old_hash != new_hash:
            changes.append(f"{name} {_short_hash(old_hash)} -> {_short_hash(new_hash)}")
    if record.status != "finished":
        return changes
    made = content_hash(str(run.artifact(stage)))
    if made != record.artifact_hash:
        changes.append(
            f"{run.artifact(stage)} {_short_hash(record.artifact_hash)} -> {_short_hash(made)}"
        )
    return changes


def _check_upstream(config: RunConfig, run: RunDirectory, manifest: Manifest) -> None:
    """An artifact that is taken from an earlier run must come from the models named now.

    Without this check `rlhf ppo --actor-model B` would silently go on with an SFT model of A.
    """
    sources: tuple[tuple[StageName, str, str | None], ...] = (
        ("sft", "--actor-model", config.model.actor),
        ("reward", "--reward-model", config.model.reward),
    )
    for stage, flag, model in sources:
        record = manifest.stages.get(stage)
        later = any(STAGES.index(chosen) > STAGES.index(stage) for chosen in config.stages)
        if model is None or stage in config.stages or not later or record is None:
            continue
        if stage == "reward" and not uses_model(config.ppo.rewards):
            continue
        made_from = record.inputs.get("input model")
        if _is_finished(run, stage, record) and made_from != content_hash(model):
            raise ConfigError(
                f"{run.stage(stage)} was made from another model than {flag} {model}; redo it "
                f"with --stages {','.join(STAGES[STAGES.index(stage) :])} --force, or use "
                "another --output-dir"
            )


def _is_finished(run: RunDirectory, stage: StageName, record: StageRecord) -> bool:
    return (
        record.status == "finished"
        and run.result(stage).is_file()
        and all(made.is_dir() for made in _products(run, stage, record))
    )


def _products(run: RunDirectory, stage: StageName, record: StageRecord) -> list[Path]:
    """The directories that a finished stage has left, by the settings that it ran with."""
    products = [run.artifact(stage)]
    if stage == "ppo":
        settings = record.settings
        if settings.get("ppo.ema_decay") is not None:
            products.append(run.actor_ema)
        if settings.get("ppo.save_critic") and settings.get("ppo.advantage_estimator") == "gae":
            products.append(run.critic)
    return products


def _some(changes: list[str]) -> str:
    more = len(changes) - _MOST_SHOWN
    return ", ".join(changes[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."


def _short_hash(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if value.startswith("hub:") else value[:12]
