"""The flags that `train`, `sft`, `reward` and `ppo` share, and the settings they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_app.errors import ConfigError
from rlhf_app.home import expanded

if TYPE_CHECKING:
    from rlhf_app.config.load import Override

_MODELS, _DATA, _RUN, _SETTINGS = "Models", "Data", "Run", "Settings"
_SOURCE_HELP = "repeatable; path or path=weight"

ActorModel = Annotated[
    str | None,
    typer.Option(
        "--actor-model",
        help="Base model: directory, GGUF file or Hub id (default: the built-in model).",
        rich_help_panel=_MODELS,
    ),
]
RewardModel = Annotated[
    str | None,
    typer.Option(
        "--reward-model",
        help="Base of the reward model; a finished one for PPO alone (default: "
        "facebook/opt-350m for OPT actors of the Hub, else the SFT model).",
        rich_help_panel=_MODELS,
    ),
]
ActorZero = Annotated[
    int | None,
    typer.Option(
        "--actor-zero-stage", help="ZeRO stage of SFT and the actor, 0-3.", rich_help_panel=_MODELS
    ),
]
RewardZero = Annotated[
    int | None,
    typer.Option(
        "--reward-zero-stage",
        help="ZeRO stage of the reward model and the critic, 0-3.",
        rich_help_panel=_MODELS,
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(
        "--lora-rank",
        help="Train low-rank adapters of this rank on every model instead of the models "
        "themselves.",
        rich_help_panel=_MODELS,
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help=f"Data split over the stages ({_SOURCE_HELP}; default: the "
        "built-in task, with --actor-model Dahoas/rm-static).",
        rich_help_panel=_DATA,
    ),
]
DataSplit = Annotated[
    str | None,
    typer.Option(
        "--data-split",
        help="Shares of SFT, reward and PPO, such as 2,4,4; shared gives all rows to each.",
        rich_help_panel=_DATA,
    ),
]
SftData = Annotated[
    list[str] | None,
    typer.Option("--sft-data", help=f"SFT rows instead ({_SOURCE_HELP}).", rich_help_panel=_DATA),
]
RewardData = Annotated[
    list[str] | None,
    typer.Option(
        "--reward-data", help=f"Preference pairs instead ({_SOURCE_HELP}).", rich_help_panel=_DATA
    ),
]
PpoData = Annotated[
    list[str] | None,
    typer.Option(
        "--ppo-data", help=f"PPO prompts instead ({_SOURCE_HELP}).", rich_help_panel=_DATA
    ),
]
EvalData = Annotated[
    list[str] | None,
    typer.Option(
        "--eval-data", help=f"Held-out rows of all stages ({_SOURCE_HELP}).", rich_help_panel=_DATA
    ),
]
Gold = Annotated[
    str | None,
    typer.Option(
        "--gold",
        metavar="MODULE:FUNCTION",
        help="A score the reward model never sees, tracked beside it; FILE.py:FUNCTION too.",
        rich_help_panel=_DATA,
    ),
]
RewardSourceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reward-source",
        metavar="SPEC",
        help="What PPO maximises instead of the reward model alone (repeatable, summed; "
        "SPEC=weight): model, FILE.py:FUNCTION, MODULE:FUNCTION, http://ADDRESS, or a sequence "
        "classifier's directory or Hub id.",
        rich_help_panel=_MODELS,
    ),
]
Deployment = Annotated[
    str | None,
    typer.Option(
        "--deployment-type",
        metavar="auto|cpu|single_gpu|single_node",
        help="Where the workers run (default: auto, a GPU if there is one, else the CPU).",
        rich_help_panel=_RUN,
    ),
]
Step = Annotated[
    str | None,
    typer.Option(
        "--step",
        metavar="1 2 3",
        help="Stages by number: 1 sft, 2 reward, 3 ppo (default: all).",
        rich_help_panel=_RUN,
    ),
]
Stages = Annotated[
    str | None,
    typer.Option(
        "--stages",
        metavar="sft,reward,ppo",
        help="Stages by name (default: all).",
        rich_help_panel=_RUN,
    ),
]
OutputDir = Annotated[
    str | None,  # a Path would make "." of an empty text
    typer.Option(
        "--output-dir",
        metavar="PATH",
        help="The run directory (default: output).",
        rich_help_panel=_RUN,
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="PATH",
        help="Go on with the run in this directory, with the settings that it was begun with; "
        "those given besides must not change what is done.",
        rich_help_panel=_RUN,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Of data order, initialisation and sampling (default: 1234).",
        rich_help_panel=_RUN,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Redo finished stages that changed, and all after them; all, if nothing changed.",
        rich_help_panel=_RUN,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print settings, plan and worker commands; change nothing.",
        rich_help_panel=_RUN,
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks of errors.", rich_help_panel=_RUN)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE.yaml", help="Settings file.", rich_help_panel=_SETTINGS),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="tiny_cpu|single_gpu|single_node",
        help="Settings to start from (default: the deployment type's; tiny_cpu for the "
        "built-in model).",
        rich_help_panel=_SETTINGS,
    ),
]
SetValues = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting by its dotted name, such as ppo.kl_coef=0.05 (repeatable).",
        rich_help_panel=_SETTINGS,
    ),
]

# Flag -> the settings it stands for.
_PLAIN: Mapping[str, tuple[str, ...]] = {
    "actor_model": ("model.actor",),
    "reward_model": ("model.reward",),
    "actor_zero_stage": ("sft.zero_stage", "ppo.actor.zero_stage"),
    "lora_rank": ("lora.rank",),
    "reward_zero_stage": ("reward.zero_stage", "ppo.critic.zero_stage"),
    "reward_source": ("ppo.rewards",),
    "data": ("data.sources",),
    "data_split": ("data.split",),
    "sft_data": ("data.sft",),
    "reward_data": ("data.reward",),
    "ppo_data": ("data.ppo",),
    "eval_data": ("data.eval",),
    "gold": ("gold.scorer",),
    "deployment_type": ("deployment.type",),
    "output_dir": ("output_dir",),
    "seed": ("seed",),
}
_STEPS = {"1": "sft", "2": "reward", "3": "ppo"}


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of one invocation, by parameter name.

    Attributes:
        values: what Typer parsed.
        stages: set by `rlhf sft|reward|ppo`; None leaves it to --step and --stages.
    """

    values: Mapping[str, Any]
    stages: tuple[str, ...] | None = None

    def settings_file(self) -> Path | None:
        """The file of `--config`, or that of the run which `--resume` names.

        Raises:
            ConfigError: both, or a directory that holds no run.
        """
        config: Path | None = self.values["config"]
        resume: str | None = self.values["resume"]
        if resume is None:
            return config
        for flag, value in (("--config", config), ("--output-dir", self.values["output_dir"])):
            if value is not None:
                raise ConfigError(f"--resume {resume} and {flag} {value}: give one of them")
        saved = expanded(resume).resolve() / "config.yaml"
        if not saved.is_file():
            raise ConfigError(
                f"--resume {resume}: holds no run ({saved} is missing); name the --output-dir of "
                "one that was begun"
            )
        return saved

    def overrides(self) -> list[Override]:
        """Settings given by flags, `--set` first: a flag of its own is the plainer word.

        Raises:
            ConfigError: a malformed `--set`, or an unknown stage.
        """
        from rlhf_app.config.load import Override, parse_set

        found = [parse_set(argument) for argument in self.values["set_values"] or ()]
        for name, keys in _PLAIN.items():
            value = self.values[name]
            if value is None or value == []:
                continue
            flag = "--" + name.replace("_", "-")
            plain = str(value) if isinstance(value, Path) else value
            found.extend(Override(key, plain, flag) for key in keys)
        if self.values["resume"] is not None:
            resumed = str(expanded(self.values["resume"]).resolve())
            found.append(Override("output_dir", resumed, "--resume"))
        stages = self.stages or _chosen_stages(self.values.get("step"), self.values.get("stages"))
        if stages is not None:
            found.append(Override("stages", list(stages), "the chosen stages"))
        return found


def _chosen_stages(step: str | None, stages: str | None) -> Sequence[str] | None:
    if step is not None and stages is not None:
        raise ConfigError("--step and --stages say the same thing: give one of them")
    flag, text = ("--step", step) if step is not None else ("--stages", stages)
    if text is None:
        return None
    names = [_STEPS.get(part.strip(), part.strip()) for part in text.split(",")]
    for name in names:
        if name not in _STEPS.values():
            raise ConfigError(f"{flag} {text}: {name!r} is no stage; use 1 2 3 or sft,reward,ppo")
    # In the order of the recipe, whatever the order given.
    return [name for name in _STEPS.values() if name in names]
