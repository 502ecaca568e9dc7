"""The flags that `rlhf data inspect` and `rlhf data stats` share, and the settings they make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from data_sources.seen import StageView
    from rlhf_app.config.schema import RunConfig, StageName

_SOURCE_HELP = "repeatable; path or path=weight"

Data = Annotated[
    list[str] | None,
    typer.Option("--data", help=f"Data split over the stages ({_SOURCE_HELP})."),
]
SftData = Annotated[list[str] | None, typer.Option("--sft-data", help="SFT rows instead.")]
RewardData = Annotated[
    list[str] | None, typer.Option("--reward-data", help="Preference pairs instead.")
]
PpoData = Annotated[list[str] | None, typer.Option("--ppo-data", help="PPO prompts instead.")]
EvalData = Annotated[
    list[str] | None, typer.Option("--eval-data", help="Held-out rows of all stages.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--actor-model", "--model", help="Whose tokenizer to use; unset: texts and characters."
    ),
]
DataSplit = Annotated[
    str | None, typer.Option("--data-split", help="Shares such as 2,4,4, or shared.")
]
ChatFormatName = Annotated[
    str | None, typer.Option("--chat-format", metavar="auto|template|human_assistant|plain")
]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", min=2, help="Tokens of prompt + response.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML settings of the run, as of `rlhf train`.")
]
SetValues = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the run (repeatable)."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


# The setting of each of these flags.
_SETTINGS = {
    "--data": "data.sources",
    "--sft-data": "data.sft",
    "--reward-data": "data.reward",
    "--ppo-data": "data.ppo",
    "--eval-data": "data.eval",
    "--actor-model": "model.actor",
    "--data-split": "data.split",
    "--chat-format": "data.chat_format",
    "--max-length": "data.max_length",
}


def data_config(
    config_file: Path | None, set_values: Sequence[str] | None = None, **flags: object
) -> RunConfig:
    """Returns the settings of a run, of which flags win over the file.

    Args:
        config_file: YAML settings, or None.
        set_values: `key=value`, as of --set; later ones and they all win.
        flags: values of the flags above, or None; `sft_data` is --sft-data.

    Raises:
        ConfigError: a file that cannot be read, or a bad value; the chat template counts.
    """
    from rlhf_app.config.load import Override, load_given, parse_set
    from rlhf_app.models.chat_templates import check_template

    given = {"--" + name.replace("_", "-"): value for name, value in flags.items() if value}
    overrides = [Override(_SETTINGS[flag], value, flag) for flag, value in given.items()]
    overrides += map(parse_set, set_values or ())
    config = load_given(config_file, overrides)
    if config.data.chat_template is not None:
        check_template(config.data.chat_template)
    return config


def stage_views(config: RunConfig, model: str) -> dict[StageName, StageView]:
    """Returns how each stage sees records through the tokenizer of a model.

    Raises:
        ConfigError: no such tokenizer, or data.max_length beyond the model's positions.
    """
    from data_sources.seen import UNLIMITED, StageView
    from rlhf_app.config.schema import STAGES
    from rlhf_app.models.chat_format import ChatFormat
    from rlhf_app.models.limits import length_limit
    from rlhf_app.models.shapes import model_positions
    from rlhf_app.models.tokenizer import load_tokenizer, tokenizer_hash

    tokenizer = load_tokenizer(model, trust_remote_code=config.model.trust_remote_code)
    fmt = ChatFormat(tokenizer, config.data.chat_format, template_file=config.data.chat_template)
    longest = length_limit(config.data.max_length, model_positions(model) or UNLIMITED, model)
    hashed = tokenizer_hash(tokenizer)
    return {name: StageView(config, name, fmt, hashed, longest) for name in STAGES}
