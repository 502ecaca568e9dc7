"""The plan that `--dry-run` prints: settings, stages and commands. Needs no network, no torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_app.config.keys import flatten
from rlhf_app.config.load import Resolved, with_values
from rlhf_app.config.rewards import source_names
from rlhf_app.config.schema import RunConfig, StageName, TrainableSettings
from rlhf_app.config.yaml_files import dump_config
from rlhf_app.deployment.launch import worker_argv
from rlhf_app.deployment.topology import Topology, count_gpus, plan_topology
from rlhf_app.models.shapes import ModelShape, model_shape
from rlhf_app.output_directory import check_output_directory
from rlhf_app.preflight import check_inputs, check_named, check_sizes
from rlhf_app.report.plan_stages import StagesPlan, plan_stages
from rlhf_app.run_directory import RunDirectory
from rlhf_app.stage_inputs import stage_inputs
from rlhf_app.url_secrets import without_secrets

BUILT_IN = "(built-in)"


@dataclass(frozen=True, slots=True)
class ModelLine:
    """One model that a stage trains or reads.

    Attributes:
        stage: the stage.
        role: actor, critic, base, ...
        name: directory or Hub id.
        shape: dimensions in short, or a question mark.
        parameters: exact count, or a question mark.
        trained: how, or whose weights it is otherwise.
    """

    stage: str
    role: str
    name: str
    shape: str
    parameters: str
    trained: str


def print_plan(
    resolved: Resolved,
    console: Console,
    *,
    force: bool,
    built: RunConfig | None = None,
    data_lines: Callable[[RunConfig], list[str]] | None = None,
) -> None:
    """Print what `rlhf train` would do, and change nothing.

    Args:
        resolved: the settings and where they came from.
        console: where to.
        force: as for the run.
        built: of the embedded default, the settings with its files, where they exist.
        data_lines: what the data of the stages comes to; not asked about the embedded default.

    Raises:
        ConfigError: the run would be refused for what it was given; a GPU need not be present for
            the plan. Finished stages that would change are part of the plan.
    """
    config = resolved.config
    topology = plan_topology(config.deployment, _gpus(config))
    check_sizes(config, topology.num_processes)
    run = RunDirectory(config.output_dir)
    check_output_directory(run)
    if resolved.embedded:
        check_named(config)
        config = with_values(config, {"model.actor": BUILT_IN})
    else:
        check_inputs(config, run)
    models = _models_table(config, run, topology)
    # Without its files the content of the embedded default cannot be compared.
    compared = built if resolved.embedded else config
    stages = StagesPlan() if compared is None else plan_stages(compared, run, force=force)
    rows = [] if resolved.embedded or data_lines is None else data_lines(config)
    _print(console, "# Settings that are not the default")
    for line in changed_settings(resolved):
        _print(console, f"  {line}")
    _print(console, "\n# All settings")
    _print(console, without_secrets(dump_config(resolved.config)))
    _print(console, "# Models")
    console.print(models)
    _print(console, "# Batches")
    for line in batch_lines(config, topology):
        _print(console, f"  {line}")
    if "ppo" in config.stages:
        _print(console, "\n# Rewards")
        for line in reward_lines(config):
            _print(console, f"  {line}")
    if rows:
        _print(console, "\n# Data")
    for line in rows:
        _print(console, f"  {line}")
    _print(console, "\n# Commands")
    for line in command_lines(config, run, topology, stages):
        _print(console, line)
    if stages.lines:
        _print(console, f"\n# Stages in {run.path}")
    for line in stages.lines:
        _print(console, f"  {line}")
    if stages.refusal is not None:
        refusal = Text(f"The run would stop: {stages.refusal}", style="bold red")
        console.print(refusal, soft_wrap=True)


def changed_settings(resolved: Resolved) -> list[str]:
    """`key = value  (where from)` for each setting that a preset, file or flag set."""
    values = flatten(resolved.config.model_dump(mode="json"))
    # Of what stands in a list, such as data.sources, only what was given.
    given = flatten(resolved.config.model_dump(mode="json", exclude_defaults=True))
    values |= {key: value for key, value in given.items() if isinstance(value, list)}
    return [
        f"{key} = {without_secrets(str(values[key]))}  ({resolved.origins[key]})"
        for key in values
        if key in resolved.origins
    ]


def model_lines(config: RunConfig, run: RunDirectory) -> list[ModelLine]:
    """Every model of every chosen stage, in order."""
    lines = []
    for stage in config.stages:
        inputs = stage_inputs(config, run, stage)
        if stage == "sft":
            lines.append(_line(config, run, stage, "model", inputs["model"], _trained(config.sft)))
        elif stage == "reward":
            lines.append(
                _line(config, run, stage, "model", inputs["model"], _trained(config.reward))
            )
        else:
            ppo = config.ppo
            # With adapters these two are the base alone. The reward model stays apart if it
            # cannot read the actor's ids, which is seen when it is loaded.
            reference = "the actor's base" if ppo.actor.lora.enabled else "frozen"
            shared = ppo.has_critic and ppo.critic.lora.enabled
            reward = "the critic's base, if ids are shared" if shared else "frozen"
            lines.append(_line(config, run, stage, "actor", inputs["actor"], _trained(ppo.actor)))
            if ppo.has_critic:
                # Without a reward model it starts from the actor.
                start = inputs.get("reward", inputs["actor"])
                lines.append(_line(config, run, stage, "critic", start, _trained(ppo.critic)))
            lines.append(_line(config, run, stage, "reference", inputs["actor"], reference))
            if "reward" in inputs:
                lines.append(_line(config, run, stage, "reward", inputs["reward"], reward))
            lines += [
                _line(config, run, stage, "reward", source.classifier, "frozen")
                for source in ppo.rewards
                if source.classifier is not None
            ]
    return lines


def reward_lines(config: RunConfig) -> list[str]:
    """What PPO maximises: weight, name, kind and place of each source."""
    sources = config.ppo.rewards
    return [
        f"{source.weight:g} x {name} ({source.kind}: {source.shown})"
        if source.kind != "model"
        else f"{source.weight:g} x {name} (the reward model)"
        for name, source in zip(source_names(sources), sources, strict=True)
    ]


def batch_lines(config: RunConfig, topology: Topology) -> list[str]:
    """How each global batch divides: micro-batch x accumulation x processes."""
    count = topology.num_processes
    lines = []
    for stage, settings, unit in (
        ("sft", config.sft, "sequences"),
        ("reward", config.reward, "pairs"),
    ):
        if stage in config.stages and settings.micro_batch_tokens is not None:
            lines.append(
                f"{stage}: {settings.batch_size} {unit} a step, in micro-batches of at most "
                f"{settings.micro_batch_tokens} tokens on each of {count} process(es)"
            )
        elif stage in config.stages:
            accumulation = settings.batch_size // (settings.micro_batch_size * count)
            lines.append(
                f"{stage}: {settings.batch_size} {unit} a step = micro-batch "
                f"{settings.micro_batch_size} x accumulation {accumulation} x processes {count}"
            )
    if "ppo" in config.stages:
        ppo = config.ppo
        accumulation = ppo.rollout_batch_size // (ppo.mini_batches * ppo.micro_batch_size * count)
        micro = f"micro-batch {ppo.micro_batch_size} x accumulation {accumulation}"
        if ppo.micro_batch_tokens is not None:
            micro = f"micro-batches of at most {ppo.micro_batch_tokens} tokens"
        prompts = f" to {ppo.rollout_batch_size // ppo.answers_per_prompt} prompts"
        lines.append(
            f"ppo: {ppo.rollout_batch_size} answers{prompts if ppo.answers_per_prompt > 1 else ''} "
            f"an update = mini-batches {ppo.mini_batches} x {micro} x processes {count}; "
            f"{ppo.ppo_epochs * ppo.mini_batches} optimizer step(s) an update"
        )
    return lines


def command_lines(
    config: RunConfig, run: RunDirectory, topology: Topology, stages: StagesPlan
) -> list[str]:
    """The worker command of each stage, or why none is needed."""
    return [
        f"  {stage}: reused, unchanged"
        if stage in stages.reused
        else f"  {stage}: {shlex.join(worker_argv(topology, run.path, stage))}"
        for stage in config.stages
    ]


def _gpus(config: RunConfig) -> int:
    return 0 if config.deployment.type in ("cpu", "single_gpu") else count_gpus()


def _line(
    config: RunConfig,
    run: RunDirectory,
    stage: StageName,
    role: str,
    name: str,
    trained: str,
) -> ModelLine:
    shape = _planned_shape(config, run, name)
    scalar = stage == "reward" or role in ("critic", "reward")
    return ModelLine(
        stage=stage,
        role=role,
        name=name,
        shape=_describe(shape),
        parameters=f"{_count(shape, scalar=scalar):,}" if shape else "?",
        trained=trained,
    )


def _trained(settings: TrainableSettings) -> str:
    zero = f"ZeRO {settings.zero_stage}"
    if settings.offload_optimizer == "cpu":
        zero = f"ZeRO {max(1, settings.zero_stage)}, optimizer on the host"
    return f"{zero}, LoRA rank {settings.lora.rank}" if settings.lora.enabled else zero


def _planned_shape(config: RunConfig, run: RunDirectory, name: str) -> ModelShape | None:
    """Shape of a model that may be yet to be made: then it has its base's."""
    shape = model_shape(name)
    if shape is None and name == str(run.artifact("sft")):
        return _planned_shape(config, run, stage_inputs(config, run, "sft")["model"])
    if shape is None and name == str(run.artifact("reward")):
        return _planned_shape(config, run, stage_inputs(config, run, "reward")["model"])
    return shape


def _count(shape: ModelShape, *, scalar: bool) -> int:
    """Parameters of the causal LM, or of the backbone with a scalar head (weights and bias)."""
    return shape.backbone_parameters + shape.embed + 1 if scalar else shape.parameters


def _describe(shape: ModelShape | None) -> str:
    if shape is None:
        return "?"
    heads = f"{shape.heads}" + (f"/{shape.kv_heads}" if shape.kv_heads != shape.heads else "")
    return f"{shape.layers} layers, width {shape.hidden}, {heads} heads, vocab {shape.vocab}"


def _models_table(config: RunConfig, run: RunDirectory, topology: Topology) -> Table:
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bf16" if topology.device == "cuda" else "fp32"
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("stage", "role", "model", "shape", "parameters", "trained"):
        table.add_column(name, justify="right" if name == "parameters" else "left", overflow="fold")
    for line in model_lines(config, run):
        table.add_row(line.stage, line.role, line.name, line.shape, line.parameters, line.trained)
    count = topology.num_processes
    table.caption = f"{dtype}, {count} process{'es' * (count > 1)} on {topology.device}"
    table.caption_justify = "left"
    return table


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
