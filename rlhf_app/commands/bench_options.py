"""What the commands of `rlhf bench` share: flags, their checks, models, output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_app.errors import EXIT_FAILED, ConfigError, StageFailed

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from rlhf_app.config.schema import RunConfig

Model = Annotated[
    str | None,
    typer.Option("--model", help="Causal LM with its own weights: directory or Hub id."),
]
Shape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        help="Random weights in the shape of a known model, such as opt-1.3b, llama-8b or tiny "
        "(default: opt-1.3b on a GPU, else tiny).",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="auto|fp32|bf16|fp16", help="Of the weights (default: auto)."),
]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", help="Tokens of every prompt.")]
AnswerTokens = Annotated[int, typer.Option("--answer-tokens", help="Most tokens of an answer.")]
AnswerLengths = Annotated[
    str,
    typer.Option(
        "--answer-lengths",
        metavar="fixed|geometric:MEAN",
        help="All of full length, or drawn and cut there.",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE|-", help="Write everything that was measured; - prints it alone."
    ),
]


_MOST = 1_000_000  # rows, tokens, repeats: more is a slip


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """Reads `32,128`.

    Raises:
        ConfigError: no numbers, or one below 1.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ConfigError(f"{flag} {text}: give whole numbers from 1, separated by commas")
    if max(counts) > _MOST:
        raise ConfigError(f"{flag} {text}: give at most {_MOST:,}")
    return counts


def check_counts(counts: Mapping[str, int]) -> None:
    """Refuses a count below 1.

    Args:
        counts: flag -> value.

    Raises:
        ConfigError: naming the first.
    """
    for flag, count in counts.items():
        if count < 1:
            raise ConfigError(f"{flag} {count}: give at least 1")
        if count > _MOST:
            raise ConfigError(f"{flag} {count}: give at most {_MOST:,}")


def resolve(model: str, flags: Sequence[tuple[str, object, str]], sets: Sequence[str]) -> RunConfig:
    """The settings behind the flags.

    Args:
        model: what takes the place of `model.actor`: a path, or the name of a shape.
        flags: (flag, value, setting); None values are left out.
        sets: values of `--set`.

    Raises:
        ConfigError: a bad setting, or one with a flag of its own.
    """
    from rlhf_app.config.load import Override, load_config, parse_set

    overrides = [parse_set(argument) for argument in sets]
    owners = {key: flag for flag, value, key in flags if value is not None} | {
        "model.actor": "--model or --shape"
    }
    for override in overrides:
        if override.key in owners:
            raise ConfigError(f"--set {override.key}: give {owners[override.key]} instead")
    overrides += [Override(key, value, flag) for flag, value, key in flags if value is not None]
    overrides.append(Override("model.actor", model, "--model"))
    return load_config(overrides=overrides).config


def check_json(target: str | None) -> None:
    """Refuses a file that cannot be written, before anything is measured.

    Args:
        target: value of `--json`.

    Raises:
        ConfigError: its directory does not exist, or it is one.
    """
    if target is None or target == "-":
        return
    if Path(target).is_dir():
        raise ConfigError(f"--json {target}: it is a directory; give a file")
    if not Path(target).parent.is_dir():
        raise ConfigError(f"--json {target}: its directory does not exist; create it first")


def device() -> torch.device:
    """Where the benchmark runs: the first GPU, else the CPU."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def on_gpu() -> bool:
    """Whether there is one."""
    return device().type == "cuda"


def say(line: str) -> None:
    """Progress, apart from what is measured."""
    typer.echo(line, err=True)


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turns an error of too little memory into one line.

    Args:
        what: was being done.

    Raises:
        StageFailed: in place of torch's error.
    """
    from rlhf_app.bench.generate import out_of_memory_line

    try:
        yield
    except RuntimeError as error:
        line = out_of_memory_line(error)
        if line is None:
            raise
        raise StageFailed(f"bench: {what}: {line}") from error


def check_positions(config: Any, name: str, prompt: int, answer: int) -> None:
    """Refuses rows beyond the model's positions.

    Raises:
        ConfigError: with both numbers.
    """
    from rlhf_app.models.load import model_max_length

    positions = model_max_length(config)
    if prompt + answer > positions:
        raise ConfigError(
            f"--prompt-tokens {prompt} + --answer-tokens {answer} exceed the {positions} "
            f"positions of {name}: lower one of them"
        )


def write(report: Mapping[str, Any], target: str | None, show: Callable[[Console], None]) -> None:
    """Prints the tables, writes the JSON, or both.

    Args:
        report: plain values.
        target: value of `--json`.
        show: prints the tables.

    Raises:
        ConfigError: the file cannot be written.
    """
    from rich.console import Console

    from rlhf_app.manifest import git_revision, versions

    facts = {
        "command": sys.argv[1:],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "git_revision": git_revision(),
    }
    text = json.dumps(facts | dict(report), indent=1)
    if target == "-":
        typer.echo(text)
        return
    show(Console(highlight=False))
    if target is not None:
        try:
            Path(target).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {target}: {error.strerror}") from error


def end(errors: Sequence[str]) -> None:
    """Name what could not be measured, if anything, and exit with 1 then.

    Args:
        errors: a line each.
    """
    for error in errors:
        typer.echo(f"rlhf: bench: {error}", err=True)
    if errors:
        raise typer.Exit(EXIT_FAILED)
