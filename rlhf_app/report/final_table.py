"""The table at the end of a run: did each stage help, what do the policies say, where is it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_app.deployment.progress import clock
from rlhf_app.run_directory import RunDirectory

POLICIES = ("base", "sft", "ppo")
_SAMPLES_SHOWN = 3
_LONGEST_SAMPLE = 300


def print_final_table(console: Console, run: RunDirectory, summary: Mapping[str, Any]) -> None:
    """Print numbers, samples and places of all finished stages of a run.

    Args:
        console: where to.
        run: the run directory, for samples and places.
        summary: what `write_summary` returned.
    """
    console.print()
    console.print(_numbers(summary))
    if "ppo" in summary:
        console.print(_policies(summary["ppo"]))
        _print_samples(console, run)
    _print_places(console, run, summary)


def _numbers(summary: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Stages", title_justify="left")
    for name in ("stage", "time", "held-out result"):
        table.add_column(name)
    for stage, numbers in summary["stages"].items():
        table.add_row(stage, clock(numbers["wall_seconds"]), _result(stage, summary[stage]))
    return table


def _result(stage: str, numbers: Mapping[str, Any]) -> str:
    if stage == "sft":
        perplexity = numbers["eval_perplexity"]
        return f"perplexity {_number(perplexity['before'])} -> {_number(perplexity['after'])}"
    if stage == "reward":
        return f"accuracy {_number(numbers['eval_accuracy'])}"
    scores = numbers["gold"] or numbers["reward"]
    name = "gold" if numbers["gold"] else "reward"
    return f"{name} {_number(scores['sft'])} (sft) -> {_number(scores['ppo'])} (ppo)"


def _policies(numbers: Mapping[str, Any]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="Policies on held-out prompts (means; KL in nats an answer)",
        title_justify="left",
    )
    table.add_column("policy")
    rows = [
        ("gold", numbers.get("gold")),
        ("reward", numbers.get("reward")),
        ("KL from sft", numbers.get("kl_per_answer")),
        ("distinct-3", numbers.get("distinct_3")),
        ("tokens", numbers.get("answer_length")),
    ]
    shown = [(name, values) for name, values in rows if values is not None]
    for name, _ in shown:
        table.add_column(name, justify="right")
    for policy in POLICIES:
        table.add_row(policy, *(_number(values.get(policy)) for _, values in shown))
    return table


def _print_samples(console: Console, run: RunDirectory) -> None:
    result = json.loads(run.result("ppo").read_text(encoding="utf-8"))
    samples = result.get("samples", [])[:_SAMPLES_SHOWN]
    if not samples:
        return
    table = Table(box=box.SIMPLE_HEAD, title="Samples", title_justify="left", show_lines=True)
    for name in ("prompt", *POLICIES):
        table.add_column(name, ratio=1, overflow="fold")
    for sample in samples:
        # Text, not markup: a model may well answer "[/bold]".
        table.add_row(*(Text(_shorten(sample[name])) for name in ("prompt", *POLICIES)))
    console.print(table)


def _print_places(console: Console, run: RunDirectory, summary: Mapping[str, Any]) -> None:
    places = [(stage, facts["artifact"]) for stage, facts in summary["stages"].items()]
    if run.critic.is_dir():
        places.append(("critic", str(run.critic)))
    places += [
        ("summary", str(run.summary)),
        ("settings", str(run.config)),
        ("metrics and logs", str(run.path / "<stage>")),
    ]
    width = max(len(name) for name, _ in places)
    for name, where in places:
        line = f"{name:<{width}}  {where}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"


def _shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST_SAMPLE else text[:_LONGEST_SAMPLE] + "..."
