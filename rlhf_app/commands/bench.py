"""`rlhf bench`: how fast this machine generates and trains, beside what it could do."""

from __future__ import annotations

import typer

from rlhf_app.commands.bench_generate import generate
from rlhf_app.commands.bench_ppo import ppo

app = typer.Typer(
    help="How fast this machine generates and trains, beside what it could do.",
    no_args_is_help=True,
)
app.command("generate")(generate)
app.command("ppo")(ppo)
