"""The tables that `rlhf verify` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rlhf_app.report.verification import Draws, Verification


def print_verification(console: Console, found: Verification, rank: int | None) -> None:
    """Print one rank's findings.

    Args:
        console: where to.
        found: the findings.
        rank: shown where there are several.
    """
    title = found.model if rank is None else f"rank {rank}: {found.model}"
    console.print(title, markup=False)
    table = Table("", "logits norm", "memory", "peak", "KV workspace")
    for switch in found.switches:
        table.add_row(
            switch.name,
            "" if switch.logits_norm is None else f"{switch.logits_norm:.7g}",
            *map(megabytes, (switch.bytes, switch.peak_bytes, switch.workspace_bytes)),
        )
    console.print(table)
    facts = Table(show_header=False)
    for label, text in rows(found):
        facts.add_row(label, text)
    console.print(facts)


def rows(found: Verification) -> list[tuple[str, str]]:
    """Labels and findings of the second table."""
    route = found.route
    if found.missing is not None:
        route += f" (missing: {found.missing})"
    numbered = list(enumerate(zip(found.greedy, found.gaps, strict=True), start=1))
    change = "" if found.logits_change is None else f"{found.logits_change:.2g} of their size"
    return [
        ("route", route),
        ("decode form", found.form),
        *((f"greedy tokens {i} against Hugging Face", str(greedy)) for i, (greedy, _) in numbered),
        *((f"log-probs {i} against training", str(gap)) for i, (_, gap) in numbered),
        *(row for i, draws in enumerate(found.draws, start=1) for row in _draws(i, draws)),
        ("optimizer step moved the logits by", change),
        ("weights", found.weights),
        ("KV workspace", found.workspace),
        ("breakdown", found.breakdown),
        ("result", "; ".join(found.problems) or "no mismatch"),
    ]


def _draws(number: int, draws: Draws) -> list[tuple[str, str]]:
    return [
        (f"sampled tokens {number} against training", str(draws.sampled)),
        (f"greedy tokens {number} against training", str(draws.greedy)),
        (f"answer ends {number}", draws.ending),
    ]


def megabytes(count: int) -> str:
    """Bytes as MB with a digit that small models need."""
    return f"{count / 1e6:,.1f} MB"
