"""The tables that `rlhf bench ppo` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf_app.report.bench_ppo import Loop, PPOReport
from rlhf_app.report.bench_tables import device_line, gigabytes

# Phases as they are called in the code -> in words.
_WORDS = {
    "prefill": "rollout, prefill",
    "decode": "rollout, decode",
    "rollout": "rollout",
    "old": "old log-probs",
    "reference": "reference log-probs",
    "values": "critic values",
    "reward": "reward scores",
    "advantages": "advantages",
    "actor_forward_backward": "actor training",
    "critic_forward_backward": "critic training",
    "step": "optimizer steps",
}


def print_ppo(console: Console, report: PPOReport) -> None:
    """Print what was measured."""
    work = report.work
    models = "; ".join(f"{role} {_model(facts)}" for role, facts in report.models.items())
    console.print(
        f"{work['answers']} answers of {work['prompt_tokens']} + {_lengths(work)} tokens, "
        f"{work['dtype']}; {models}",
        markup=False,
    )
    console.print(_settings(work["ppo"], report.models), markup=False)
    console.print(device_line(report.device), markup=False)
    done = [loop for loop in report.loops if loop.seconds]
    for loop in done:
        console.print(_phase_table(report, loop))
    if done:
        console.print(_summary(report, done))
    for loop in done:
        console.print(f"{loop.generation}: decode form: {loop.form}", markup=False)


def _lengths(work: Mapping[str, Any]) -> str:
    mean = work["answer_lengths"]["mean"]
    return (
        f"{work['answer_tokens']}"
        if mean is None
        else f"{mean:g} (at most {work['answer_tokens']})"
    )


def _settings(ppo: Mapping[str, Any], trained: Iterable[str]) -> str:
    """What decides the seconds beside the models, in words."""
    rows = f"{ppo['micro_batch_size']} rows"
    if ppo["micro_batch_tokens"] is not None:
        rows = f"{ppo['micro_batch_tokens']} tokens"
    parts = [f"micro-batches of {rows}"]
    for name in trained:
        model = ppo[name]
        words = [f"ZeRO {model['zero_stage']}"]
        if model["lora"]["rank"]:
            words.append(f"LoRA rank {model['lora']['rank']}")
        if model["gradient_checkpointing"]:
            words.append("gradient checkpointing")
        if model["offload_optimizer"] != "none":
            words.append(f"optimizer on the {model['offload_optimizer']}")
        parts.append(f"{name}: {', '.join(words)}")
    return "; ".join(parts)


def _model(facts: dict[str, object]) -> str:
    text = f"{facts['name']} ({facts['parameters']:,} parameters"
    if facts["trained"] != facts["parameters"]:
        text += f", {facts['trained']:,} trained"
    return text + ")"


def _phase_table(report: PPOReport, loop: Loop) -> Table:
    table = Table(title=f"seconds of an iteration, {loop.generation} generation")
    for column in ("", "seconds", "limit", "fraction", "MFU", "peak memory"):
        table.add_column(column, justify="left" if not column else "right")
    rates = report.phase_rates(loop)
    for name, seconds in loop.phases.items():
        limit, rate = report.limit_of(name), rates.get(name, {})
        utilisation = rate.get("model_flops_utilisation")
        peak = loop.peak_bytes.get("generate" if name in ("decode", "rollout") else name)
        table.add_row(
            _WORDS.get(name, name),
            f"{seconds:.3g}",
            "" if limit is None else f"{limit.seconds:.3g}",
            f"{rate['fraction']:.3f}" if rate else "",
            f"{utilisation:.1%}" if utilisation else "",
            "" if peak is None else gigabytes(peak),
        )
    others = loop.iteration_seconds - sum(loop.phases.values())
    table.add_row("others", f"{max(0.0, others):.3g}")
    whole = report.rates(loop)
    table.add_section()
    table.add_row(
        "iteration",
        f"{loop.iteration_seconds:.3g}",
        f"{report.limit_seconds:.3g}",
        f"{whole['fraction']:.3f}",
        f"{whole['model_flops_utilisation']:.1%}",
        gigabytes(max(loop.peak_bytes.values())),
    )
    return table


def _summary(report: PPOReport, loops: list[Loop]) -> Table:
    table = Table("", *(loop.generation for loop in loops))
    rates = [report.rates(loop) for loop in loops]
    rows = [
        ("answers/s", "sequences_per_second", "{:.3g}"),
        ("  limit", "limit_sequences_per_second", "{:.3g}"),
        ("  fraction of the limit", "fraction", "{:.3f}"),
        ("  the same where decode only reads", "fraction_reading", "{:.3f}"),
        ("  the same without an old log-prob pass", "fraction_without_old", "{:.3f}"),
        ("answer tokens/s", "tokens_per_second", "{:,.0f}"),
    ]
    for label, key, form in rows:
        table.add_row(label, *(form.format(rate[key]) for rate in rates))
    if report.speedup is not None:
        table.add_row("engine over native", f"{report.speedup:.2f}x")
    for column in table.columns[1:]:
        column.justify = "right"
    return table
