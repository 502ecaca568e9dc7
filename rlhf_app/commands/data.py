"""`rlhf data`: look at data, and make preference pairs."""

from __future__ import annotations

import typer

from rlhf_app.commands.data_inspect import inspect
from rlhf_app.commands.data_make_pairs import make_pairs
from rlhf_app.commands.data_stats import stats

app = typer.Typer(help="Look at data, and make preference pairs.", no_args_is_help=True)
app.command("inspect")(inspect)
app.command("stats")(stats)
app.command("make-pairs")(make_pairs)
