"""`rlhf data`: look at data, make preference pairs, and see what is kept of large data."""

from __future__ import annotations

import typer

from rlhf_app.commands.data_cache import cache
from rlhf_app.commands.data_inspect import inspect
from rlhf_app.commands.data_make_pairs import make_pairs
from rlhf_app.commands.data_stats import stats

app = typer.Typer(
    help="Look at data, make preference pairs, and see the cache.", no_args_is_help=True
)
app.command("inspect")(inspect)
app.command("stats")(stats)
app.command("make-pairs")(make_pairs)
app.command("cache")(cache)
