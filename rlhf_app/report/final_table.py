"""The table at the end of a run: did each stage help, what do the policies say, where is it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_app.deployment.progress import clock
from rlhf_app.run_directory import RunDirectory

POLICIES = ("base", "sft", "ppo")
_PARTS = {
    "launch": "start-up: processes, imports",
    "data": "start-up: data",
    "model": "start-up: models",
    "engine": "start-up: engines",
    "generation": "generation",
    "scoring": "scoring",
    "training": "training",
    "evaluation": "evaluation",
    "saving": "saving",
}
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
    console.print(time_table(summary))
    _print_lost_rows(console, summary)
    _print_reward_quality(console, summary)
    if "ppo" in summary:
        console.print(_policies(summary["ppo"]["policies"]))
        _print_health(console, run)
        _print_samples(console, run)
    _print_places(console, run, summary)


def _numbers(summary: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Stages", title_justify="left")
    for name in ("stage", "time", "rows", "held out", "held-out result"):
        table.add_column(name)
    for stage, facts in summary["stages"].items():
        rows = facts["rows"]
        table.add_row(
            stage,
            clock(facts["wall_seconds"]),
            f"{rows['train']:,}",
            f"{rows['eval']:,}",
            _result(stage, summary[stage]),
        )
    return table


def time_table(summary: Mapping[str, Any]) -> Table:
    """Where the time of each stage went, and which share of it was start-up.

    Args:
        summary: what `write_summary` returned.
    """
    stages = summary["stages"]
    columns = [facts["seconds"] for facts in stages.values()]
    wall = [facts["wall_seconds"] for facts in stages.values()]
    startup = [facts["startup_seconds"] for facts in stages.values()]
    table = Table(
        box=box.SIMPLE_HEAD,
        title="Where the time goes (seconds of each stage's processes)",
        title_justify="left",
    )
    table.add_column("")
    for name in (*stages, "all"):
        table.add_column(name, justify="right")

    def add(name: str, seconds: Sequence[float]) -> None:
        table.add_row(name, *(f"{number:.1f}" for number in (*seconds, sum(seconds))))

    for part, meaning in _PARTS.items():
        if any(part in column for column in columns):
            add(meaning, [column.get(part, 0.0) for column in columns])
    add("total", wall)
    shares = zip([*startup, sum(startup)], [*wall, sum(wall)], strict=True)
    table.add_row("start-up", *(f"{part / max(whole, 1e-9):.0%}" for part, whole in shares))
    return table


def _print_lost_rows(console: Console, summary: Mapping[str, Any]) -> None:
    """Say what was left out or cut, and why: no row goes missing in silence."""
    for stage, facts in summary["stages"].items():
        reasons = facts["rows"]["dropped"]
        lost = "; ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
        if lost:
            console.print(f"{stage}, rows not used as they are: {lost}", markup=False)


def _print_reward_quality(console: Console, summary: Mapping[str, Any]) -> None:
    """Say in one line whether the reward model is calibrated, and whether it judges by length."""
    found = summary.get("reward", {}).get("evaluation")
    if found:
        by_length = (
            f"{_known(found[f'accuracy_chosen_{side}'])} where the {side} answer is chosen"
            for side in ("longer", "shorter")
        )
        console.print(
            f"reward model: calibration error {_number(found['calibration'])}; accuracy "
            f"{', '.join(by_length)} (longer wins: {_number(found['longer_wins'])}, shorter wins: "
            f"{_number(found['shorter_wins'])}); correlation of score and length "
            f"{_known(found['score_length_correlation'])}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _result(stage: str, numbers: Mapping[str, Any]) -> str:
    kept = numbers.get("kept")
    found = _found(stage, numbers)
    return f"{found}, kept: step {kept['step']} by {kept['metric']}" if kept else found


def _found(stage: str, numbers: Mapping[str, Any]) -> str:
    if stage == "sft":
        perplexity = numbers["eval_perplexity"]
        return f"perplexity {_number(perplexity['before'])} -> {_number(perplexity['after'])}"
    if stage == "reward":
        return f"accuracy {_number(numbers['eval_accuracy'])}"
    name = "gold" if numbers["gold"] else "reward"
    before, after = (numbers["policies"][policy][name] for policy in ("sft", "ppo"))
    return f"{name} {_number(before)} (sft) -> {_number(after)} (ppo)"


def _policies(policies: Mapping[str, Any]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="Policies on held-out prompts (means; by length: correlation of reward and length; "
        "KL in nats an answer, entropy in nats a token)",
        title_justify="left",
    )
    table.add_column("policy")
    columns = {
        "gold": "gold",
        "reward": "reward",
        "by length": "reward_length_correlation",
        "KL from sft": "kl_per_answer",
        "entropy": "entropy",
        "distinct-3": "distinct_3",
        "tokens": "answer_length",
        "ended": "eos_rate",
    }
    shown = {
        name: key
        for name, key in columns.items()
        if any(key in policies[policy] for policy in POLICIES)
    }
    for name in shown:
        table.add_column(name, justify="right")
    for policy in POLICIES:
        table.add_row(policy, *(_known(policies[policy].get(key)) for key in shown.values()))
    return table


def _print_health(console: Console, run: RunDirectory) -> None:
    """Say why PPO ended early, and what looked wrong on the way."""
    result = json.loads(run.result("ppo").read_text(encoding="utf-8"))
    lines = [f"update {sign['update']}: {sign['text']}" for sign in result.get("warnings", [])]
    if result.get("stopped"):
        lines.append(f"ended after update {result['updates']}: {result['stopped']}")
    for line in lines:
        console.print(f"ppo, {line}", markup=False, highlight=False, soft_wrap=True)


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
    if run.samples.is_file():
        places.append(("answers on the way", str(run.samples)))
    if run.actor_ema.is_dir():
        places.append(("averaged actor", str(run.actor_ema)))
    places += [
        ("summary", str(run.summary)),
        ("settings", str(run.config)),
        ("metrics and logs", str(run.path / "<stage>")),
    ]
    width = max(len(name) for name, _ in places)
    for name, where in places:
        line = f"{name:<{width}}  {where}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _known(value: float | None) -> str:
    return "-" if value is None else _number(value)


def _number(value: float) -> str:
    return f"{value:z.3f}" if abs(value) < 1000 else f"{value:,.0f}"


def _shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST_SAMPLE else text[:_LONGEST_SAMPLE] + "..."
