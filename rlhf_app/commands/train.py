"""`rlhf train`: any of the three stages, in order."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlhf_app.commands import options
from rlhf_app.errors import EXIT_INTERRUPTED, Interrupted

if TYPE_CHECKING:
    from rlhf_app.config.schema import RunConfig


def train(
    actor_model: options.ActorModel = None,
    reward_model: options.RewardModel = None,
    reward_source: options.RewardSourceOption = None,
    actor_zero_stage: options.ActorZero = None,
    reward_zero_stage: options.RewardZero = None,
    lora_rank: options.LoraRank = None,
    data: options.Data = None,
    data_split: options.DataSplit = None,
    sft_data: options.SftData = None,
    reward_data: options.RewardData = None,
    ppo_data: options.PpoData = None,
    eval_data: options.EvalData = None,
    gold: options.Gold = None,
    step: options.Step = None,
    stages: options.Stages = None,
    deployment_type: options.Deployment = None,
    output_dir: options.OutputDir = None,
    resume: options.Resume = None,
    seed: options.Seed = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    debug: options.Debug = False,
    config: options.ConfigFile = None,
    preset: options.Preset = None,
    set_values: options.SetValues = None,
) -> None:
    """Train SFT, reward model and PPO; finished stages are reused."""
    execute(options.Flags(dict(locals())))


def execute(flags: options.Flags) -> None:
    """Resolve the settings, then print the plan or run it.

    Args:
        flags: the parsed flags.

    Raises:
        ConfigError: bad input.
        StageFailed: a worker failed.
    """
    from rich.console import Console

    from rlhf_app.config.load import load_config
    from rlhf_app.pipeline import built_default, run_pipeline
    from rlhf_app.report.plan import print_plan

    values = flags.values
    settings_file, overrides = flags.settings_file(), flags.overrides()
    if values["resume"] is not None and settings_file is not None:
        _go_where_it_began(settings_file.with_name("manifest.json"))
    resolved = load_config(preset=values["preset"], config_file=settings_file, overrides=overrides)
    console = Console()
    for ignored in _without_effect(resolved.config):
        print(f"rlhf: warning: {ignored}", file=sys.stderr)
    if values["dry_run"]:
        built = built_default(resolved.config) if resolved.embedded else None
        print_plan(resolved, console, force=values["force"], built=built, data_lines=_data_lines)
        return
    try:
        run_pipeline(resolved, force=values["force"], console=console)
    except Interrupted as interrupted:
        print(f"rlhf: {interrupted}.", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except KeyboardInterrupt as interrupt:
        print(
            f"rlhf: interrupted{f' by {interrupt}' if str(interrupt) else ''}; the workers are "
            "stopped. The same command goes on with the unfinished stage, from its last checkpoint "
            "if there is one.",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _go_where_it_began(manifest: Path) -> None:
    """Relative names in a run's settings start from the directory in which it was begun."""
    try:
        directory = json.loads(manifest.read_text(encoding="utf-8"))["directory"]
        os.chdir(directory)
    except (OSError, ValueError, KeyError, TypeError):
        return  # its names may be absolute; those that are not will be missed by name


def _data_lines(config: RunConfig) -> list[str]:
    """The rows of each stage, or that data was not opened: a plan needs no network.

    Raises:
        ConfigError: a stage would have nothing to train or to evaluate on.
    """
    from data_sources.stage_check import check_stage_data, is_all_small

    if not is_all_small(config, config.stages):
        return [
            "not opened: not all of it is in small files here. The run looks at it before its "
            "first stage, rlhf data inspect at any time"
        ]
    return [
        f"{stage}: {train} rows to train on, {held} to evaluate on, before any is too long"
        for stage, (train, held) in check_stage_data(config, config.stages).items()
    ]


def _without_effect(config: RunConfig) -> list[str]:
    from rlhf_app.config.lora import settings_without_effect
    from rlhf_app.config.rewards import rewards_without_effect
    from rlhf_app.config.unused import ppo_without_effect

    groups = {
        "sft": config.sft.lora,
        "reward": config.reward.lora,
        "ppo.actor": config.ppo.actor.lora,
        "ppo.critic": config.ppo.critic.lora,
    }
    return [
        *settings_without_effect(groups, config.lora),
        *rewards_without_effect(config),
        *(ppo_without_effect(config.ppo) if "ppo" in config.stages else []),
    ]
