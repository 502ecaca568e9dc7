"""The tables that `rlhf bench generate` prints: a row per figure, a column per batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf_app.report.bench_generate import EngineRun, GenerateReport, Row

Figure = tuple[str, Callable[[Row], str]]


def print_generate(console: Console, report: GenerateReport) -> None:
    """Print what was measured."""
    model, work = report.model, report.work
    console.print(
        f"{model['name']}: {model['parameters']:,} parameters, {model['dtype']}, vocabulary "
        f"{model['vocabulary']:,}; prompts of {work['prompt_tokens']} tokens, answers of "
        f"{_answers(work)}",
        markup=False,
    )
    console.print(device_line(report.device), markup=False)
    varied = work["lengths"]["mean"] is not None
    console.print(
        _table(report.rows, _VARIED if varied else _FIXED, "slots" if varied else "batch")
    )
    split = [row for row in report.rows if row.split is not None]
    if split:
        console.print(_table(split, _split_figures(split[0]), "ms of a decode step, batch"))
    if varied and work["hf"]:
        console.print("HF generate not run: answers have different lengths", markup=False)
    for line in dict.fromkeys(_remarks(report.rows)):
        console.print(line, markup=False)


def device_line(device: dict[str, Any]) -> str:
    """What was measured of the device, in words."""
    return (
        f"{device['name']}: reads {device['bandwidth'] / 1e9:,.4g} GB/s, multiplies at "
        f"{device['peak'] / 1e12:.3g} TFLOP/s (measured now)"
    )


def _answers(work: dict[str, Any]) -> str:
    mean = work["lengths"]["mean"]
    if mean is None:
        return f"{work['answer_tokens']}"
    return f"min(geometric with mean {mean:g}, {work['answer_tokens']})"


def _remarks(rows: Iterable[Row]) -> Iterable[str]:
    rows = list(rows)
    forms = {row.engine.form for row in rows if row.engine is not None}
    for row in rows:
        if row.engine is not None:
            which = f"{row.slots} rows: " if len(forms) > 1 else ""
            yield f"{which}decode form: {row.engine.form}"
        if row.hf is not None and row.hf.skipped:
            yield f"{row.slots} rows: HF generate not run: {row.hf.skipped}"
        if row.split_missing:
            yield f"decode step not split: {row.split_missing}"


def _table(rows: list[Row], figures: list[Figure], corner: str) -> Table:
    table = Table(corner, *(str(row.slots) for row in rows))
    for column in table.columns[1:]:
        column.justify = "right"
    for label, show in figures:
        cells = [show(row) for row in rows]
        if any(cells):
            table.add_row(label, *cells)
    return table


def _rate(key: str, form: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.rates().get(key)
        return "" if value is None else form.format(value)

    return show


def _engine(show: Callable[[EngineRun], str]) -> Callable[[Row], str]:
    return lambda row: "failed" if row.engine is None else show(row.engine)


def _of_limit(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.limit is None else f"{getattr(row.limit, name):.3g}"


_TIMES: list[Figure] = [
    ("seconds of prefill", _engine(lambda run: f"{run.prefill_seconds:.3g}")),
    ("  its limit", _of_limit("prefill_seconds")),
    ("seconds of decode", _engine(lambda run: f"{run.decode_seconds:.3g}")),
    ("  its limit", _of_limit("decode_seconds")),
    ("seconds in all", _engine(lambda run: f"{run.total_seconds:.3g}")),
    ("first rollout, set-up included", _engine(lambda run: f"{run.first_seconds:.3g}")),
    ("peak memory", _engine(lambda run: gigabytes(run.peak_bytes))),
    ("  keys and values", _engine(lambda run: gigabytes(run.workspace_bytes))),
]
_FIXED: list[Figure] = [
    ("tokens/s, HF generate", _rate("hf_tokens_per_second", "{:,.0f}")),
    ("tokens/s, engine", _rate("tokens_per_second", "{:,.0f}")),
    ("  over HF generate", _rate("ratio_to_hf", "{:.2f}x")),
    ("  limit", _rate("limit_tokens_per_second", "{:,.0f}")),
    ("  fraction of the limit", _rate("fraction", "{:.3f}")),
    ("tokens/s, engine, decode alone", _rate("decode_tokens_per_second", "{:,.0f}")),
    ("  limit", _rate("limit_decode_tokens_per_second", "{:,.0f}")),
    ("  fraction of the limit", _rate("decode_fraction", "{:.3f}")),
    *_TIMES,
]
_VARIED: list[Figure] = [
    ("answers", lambda row: f"{row.requests:,}"),
    ("their tokens", _engine(lambda run: f"{run.generated_tokens:,}")),
    ("tokens/s, engine", _rate("tokens_per_second", "{:,.0f}")),
    ("  floor of the schedule", _rate("floor_tokens_per_second", "{:,.0f}")),
    ("  fraction of the floor", _rate("floor_fraction", "{:.3f}")),
    ("  fraction, GEMMs bound by arithmetic", _rate("fraction", "{:.3f}")),
    ("slots in use", _rate("slot_utilisation", "{:.1%}")),
    ("  in an ideal refill", _rate("ideal_slot_utilisation", "{:.1%}")),
    ("decode steps", _engine(lambda run: f"{run.decode_steps:,}")),
    ("  of an ideal refill", lambda row: f"{row.ideal_steps:,}" if row.ideal_steps else ""),
    *_TIMES,
]


def _split_figures(example: Row) -> list[Figure]:
    assert example.split is not None

    def of_kind(kind: str) -> Callable[[Row], str]:
        return lambda row: "" if row.split is None else f"{1e3 * row.split.seconds[kind]:.3g}"

    def per_step(name: str) -> Callable[[Row], str]:
        def show(row: Row) -> str:
            limit = row.limit
            return "" if limit is None else f"{1e3 * getattr(limit, name) / limit.steps:.3g}"

        return show

    figures: list[Figure] = []
    for kind in example.split.seconds:
        figures.append((kind, of_kind(kind)))
        if kind == "attention":
            figures.append(("  limit: keys and values read", per_step("kv_seconds")))
        if kind == "GEMM":
            figures.append(("  limit: weights read or multiplied", per_step("gemm_seconds")))
    figures.append(
        (
            "no kernel seen",
            lambda row: "" if row.split is None else f"{1e3 * row.split.between:.3g}",
        )
    )
    figures.append(
        ("step", lambda row: "" if row.split is None else f"{1e3 * row.split.step_seconds:.3g}")
    )
    return figures


def gigabytes(count: int) -> str:
    """Bytes as GB with the digits that small models need."""
    return f"{count / 1e9:.3g} GB"
