"""The command line `rlhf`: which commands there are, and how errors become exit codes.

Nothing here imports torch, so that help is instant; commands import what they need when
they run.
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated

import typer

import rlhf_app
from rlhf_app.commands import bench, data, stage, train, verify
from rlhf_app.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigError,
    StageFailed,
)
from rlhf_app.lasting_output import lasting_output
from rlhf_app.origins import check_origins
from rlhf_app.url_secrets import without_secrets

_HELP = """Align a language model: supervised fine-tuning, a reward model, then PPO.

Without arguments `rlhf train` runs all three stages on a built-in model and task.
"""

app = typer.Typer(
    name="rlhf",
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
for _name, _command in stage.COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(data.app, name="data")
app.command("verify")(verify.verify)
app.add_typer(bench.app, name="bench")

# Options after which several values may stand, as in DeepSpeed-Chat's `--step 1 2 3`.
_MANY_VALUES = {
    "--step": frozenset({"1", "2", "3"}),
    "--stages": frozenset({"sft", "reward", "ppo"}),
}


# What the parser makes of an interrupt.
_INTERRUPTED_PARSER = 130
# They are not over because nobody reads what they print.
_OUTLIVES_ITS_TERMINAL = frozenset({"train", *stage.COMMANDS})


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rlhf {rlhf_app.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def join_values(arguments: Sequence[str]) -> list[str]:
    """Turn `--step 1 2 3` into `--step 1,2,3`, which the parser understands.

    Only values that the option can have are drawn in, so a following word stays what it is.
    """
    joined: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        joined.append(word)
        allowed = _MANY_VALUES.get(word)
        if allowed is None:
            continue
        values = []
        while words and set(words[0].split(",")) <= allowed:
            values.append(words.pop(0))
        if values:
            joined.append(",".join(values))
    return joined


def _describe(error: OSError) -> str:
    """A disk that is full or cannot be written is no fault of this program's."""
    where = f"{error.filename}: " if error.filename else ""
    advice = {
        errno.ENOSPC: "; free some, and give the same command again",
        errno.EDQUOT: "; free some, and give the same command again",
        errno.EROFS: "; name another --output-dir",
    }.get(error.errno or 0, " (--debug shows where)")
    return f"{where}{error.strerror or error}{advice}"


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Args:
        arguments: without the program's name.

    Returns:
        0; 1 when something failed; 2 on bad input; 3 when interrupted.
    """
    with lasting_output() if set(arguments[:1]) & _OUTLIVES_ITS_TERMINAL else nullcontext():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    debug = "--debug" in arguments
    try:
        check_origins()
        app(join_values(arguments), prog_name="rlhf")
    except SystemExit as leave:
        if leave.code == _INTERRUPTED_PARSER:
            print("rlhf: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        return leave.code if isinstance(leave.code, int) else EXIT_FAILED
    except (ConfigError, StageFailed, OSError) as error:
        if debug:
            print(without_secrets(traceback.format_exc()), end="", file=sys.stderr)
        text = _describe(error) if isinstance(error, OSError) else str(error)
        line = without_secrets(" ".join(text.split()))
        print(f"rlhf: error: {line}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError) else EXIT_FAILED
    return 0
