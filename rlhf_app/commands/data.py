"""`rlhf data`: look at data, and make preference pairs."""

from __future__ import annotations

import typer

app = typer.Typer(help="Look at data, and make preference pairs.", no_args_is_help=True)
