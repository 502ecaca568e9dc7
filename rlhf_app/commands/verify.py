"""`rlhf verify`: does the hybrid engine generate what it trains, with this model and settings?"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_app.commands import options
from rlhf_app.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, StageFailed

if TYPE_CHECKING:
    from rich.console import Console

    from rlhf_app.config.load import Override
    from rlhf_app.config.schema import RunConfig
    from rlhf_app.report.verification import Verification

_BUILT_IN = "built-in"


def verify(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Causal LM: directory, GGUF file or Hub id (default: the built-in one)."
        ),
    ] = None,
    zero_stage: Annotated[
        int | None, typer.Option("--zero-stage", help="ZeRO stage, 0-3 (default: 0).")
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option("--lora-rank", help="Rank of LoRA adapters (default: none).")
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option("--tp", help="Processes that share each rollout (default: 1)."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="auto|fp32|bf16|fp16", help="Of the weights (default: auto)."
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", min=1, help="Worker processes (default: as --tp needs)."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every rank's findings as JSON.")
    ] = False,
    seed: options.Seed = None,
    deployment_type: options.Deployment = None,
    debug: options.Debug = False,
    config: options.ConfigFile = None,
    set_values: options.SetValues = None,
) -> None:
    """Check the path train -> generate -> train on a model: tokens, log-probs, memory."""
    from rich.console import Console

    overrides = _overrides(
        {
            "--model": (model, "model.actor"),
            "--zero-stage": (zero_stage, "ppo.actor.zero_stage"),
            "--lora-rank": (lora_rank, "ppo.actor.lora.rank"),
            "--tp": (tp, "hybrid_engine.inference_tp_size"),
            "--dtype": (dtype, "model.dtype"),
            "--processes": (
                # Where --tp is wrong, the error shall name it alone.
                tp if processes is None and tp is not None and tp > 0 else processes,
                "deployment.num_processes",
            ),
            "--seed": (seed, "seed"),
            "--deployment-type": (deployment_type, "deployment.type"),
        },
        set_values or [],
    )
    directory = Path(tempfile.mkdtemp(prefix="rlhf-verify-"))
    try:
        ranks = _run(directory, config, overrides, Console(stderr=True, highlight=False))
    except StageFailed:
        raise  # the worker's log stays: the error names it
    except KeyboardInterrupt as interrupt:
        shutil.rmtree(directory, ignore_errors=True)
        cause = f" by {interrupt}" if str(interrupt) else ""
        typer.echo(f"rlhf: interrupted{cause}; the workers are stopped", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    if as_json:
        print(json.dumps([rank.as_dict() for rank in ranks], indent=2))
    else:
        _print(ranks, Console(highlight=False))
    problems = [
        f"rank {number}: {problem}" if len(ranks) > 1 else problem
        for number, rank in enumerate(ranks)
        for problem in rank.problems
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        typer.echo(f"rlhf: verify failed: {problems[0]}{more}", err=True)
        raise typer.Exit(EXIT_FAILED)


def _overrides(flags: dict[str, tuple[object, str]], set_values: list[str]) -> list[Override]:
    from rlhf_app.config.load import Override, parse_set

    found = [parse_set(argument) for argument in set_values]
    found += [
        Override(key, value, flag) for flag, (value, key) in flags.items() if value is not None
    ]
    return found


def _run(
    directory: Path, config_file: Path | None, overrides: list[Override], console: Console
) -> list[Verification]:
    """Run the worker job; the findings of every rank."""
    from rlhf_app.config.hidden import hidden_settings
    from rlhf_app.config.load import load_config, with_values
    from rlhf_app.config.yaml_files import dump_config
    from rlhf_app.deployment.launch import worker_argv, worker_environment
    from rlhf_app.deployment.supervise import run_workers
    from rlhf_app.deployment.topology import check_topology, count_gpus, plan_topology
    from rlhf_app.report.verification import Verification
    from rlhf_app.run_directory import RunDirectory

    config = load_config(config_file=config_file, overrides=overrides).config
    _check(config)
    gpus = count_gpus() if config.deployment.type != "cpu" else 0
    if config.deployment.type == "auto" and gpus and (config.deployment.num_processes or 1) > 1:
        config = with_values(config, {"deployment.type": "single_node"})
    topology = plan_topology(config.deployment, gpus)
    check_topology(topology, gpus)
    changes = {
        "deployment.type": topology.type,
        "deployment.num_processes": topology.num_processes,
        "model.actor": config.model.actor or _built_in(directory, config.seed),
    }
    config = with_values(config, changes)
    run = RunDirectory(directory)
    run.config.write_text(dump_config(config), encoding="utf-8")
    run_workers(
        worker_argv(topology, run.path, "verify"),
        worker_environment(topology, os.environ) | hidden_settings(config),
        run,
        "verify",
        topology.num_processes,
        console,
    )
    findings = json.loads(run.result("verify").read_text(encoding="utf-8"))
    ranks = [Verification.from_dict(values) for values in findings["ranks"]]
    for found in ranks:
        found.model = found.model.replace(str(directory / _BUILT_IN), "the built-in model")
    return ranks


def _check(config: RunConfig) -> None:
    """Refuse what the workers would only find after loading the model."""
    tp, processes = config.hybrid_engine.inference_tp_size, config.deployment.num_processes or 1
    if processes % tp:
        raise ConfigError(
            f"--tp {tp} does not divide --processes {processes}: give a multiple of it"
        )


def _built_in(directory: Path, seed: int) -> str:
    """The built-in model with random weights, as `rlhf train` starts from."""
    from rlhf_app.pipeline import quiet_libraries

    path = directory / _BUILT_IN
    path.mkdir()
    with quiet_libraries():
        from data_sources.embedded.base_model import build_base_model

        build_base_model(path, seed)
    return str(path)


def _print(ranks: list[Verification], console: Console) -> None:
    from rlhf_app.report.verify_tables import print_verification

    for number, found in enumerate(ranks):
        # All ranks have the same columns; the others are shown where they found something.
        if number == 0 or found.problems:
            print_verification(console, found, number if len(ranks) > 1 else None)
