"""The tables of `rlhf data stats` in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_sources.stats.length_bias import LengthBias
from data_sources.stats.lengths import PERCENTILES, Lengths
from data_sources.stats.summary import DataStats, SourceStats, StageStats
from rlhf_app.report.visible import visible

_BLOCKS = " " + "".join(map(chr, range(0x2581, 0x2589)))  # eighths of a block
#: Beside a source that a run refuses; the reason comes last of all.
STOPS = "a run stops here"
# Lines shorter than this have no room for all numbers of a text's lengths.
_WIDE = 130
_FEW = (5, 50, 95, 99)
_ASCII_BLOCKS = " .:-=+*#@"


def print_stats(console: Console, stats: DataStats) -> None:
    """Prints everything but the example rows of stages, and what `stats.problem` says."""
    console.print(_sources(stats.sources))
    console.print(_contents(stats.sources))
    _print_bad_rows(console, stats.sources)
    console.print(_stages(stats))
    plain = not console.encoding.lower().startswith("utf")
    if console.width >= _WIDE:
        console.print(_lengths(stats, PERCENTILES, numbers=True, spread=True, ascii_only=plain))
    else:
        console.print(_lengths(stats, _FEW, numbers=True, spread=False, ascii_only=plain))
        console.print(_lengths(stats, (), numbers=False, spread=True, ascii_only=plain))
    if any(stage.bias for stage in stats.stages.values()):
        console.print(_bias(stats))
    stages = [stage.problem for stage in stats.stages.values()]
    # Where no stage can start for want of a source, theirs are no news.
    problems = [*stats.refusals, *(() if stats.refusals and all(stages) else stages)]
    for problem in dict.fromkeys(problems):
        if problem and problem != stats.problem:
            console.print(Text(visible(problem), style="red"))


def share(part: int, whole: int) -> str:
    """Returns a count with its share, as in "12 (3.4 %)"; 0 stands alone."""
    return f"{part} ({100 * part / whole:.1f} %)" if part and whole else str(part)


def histogram_line(lengths: Lengths, *, ascii_only: bool = False) -> str:
    """Returns one character per bin, the higher the more texts; a bin with any is not blank."""
    bins = [number for _, _, number in lengths.histogram()]
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    top = max(bins, default=1)
    return "".join(blocks[-(-number * (len(blocks) - 1) // top)] for number in bins)


def _table(title: str, names: Iterable[str], numbers: Iterable[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _name(source: SourceStats) -> str:
    return visible(source.counts.path) + (" (evaluation)" if source.evaluation else "")


def _sources(sources: list[SourceStats]) -> Table:
    table = _table("Sources", ("source", "shape"), ("rows", "usable", "bad", "left out", "records"))
    table.add_column("remarks")
    for source in sources:
        counts = source.counts
        remarks = [f"{n} {visible(note)}" for note, n in counts.notes.most_common()]
        remarks += map(visible, counts.looks)
        if source.stops_a_run:
            remarks.insert(0, STOPS)
        table.add_row(
            Text(_name(source)),
            Text(counts.shape),
            str(counts.read),
            str(counts.usable),
            share(counts.bad.total(), counts.read),
            share(counts.set_aside.total(), counts.read),
            str(counts.records),
            Text("\n".join(remarks) or "-"),
        )
    return table


def _contents(sources: list[SourceStats]) -> Table:
    table = _table("Contents", ("source",), ("prompts", "same prompt", "duplicates"))
    table.add_column("chosen = rejected", justify="right")
    table.add_column("scripts of prompts")
    table.add_column("scripts of answers")
    table.add_column("with emoji", justify="right")
    for source in sources:
        records = source.counts.records
        table.add_row(
            Text(_name(source)),
            str(source.duplicates.prompts),
            share(source.duplicates.same_prompt, records),
            share(source.duplicates.exact, records),
            str(source.identical_pairs),
            *(
                "\n".join(
                    f"{script} {share(n, scripts.texts.total())}"
                    for script, n in scripts.texts.most_common(5)
                )
                or "-"
                for scripts in (source.prompts, source.answers)
            ),
            str(source.prompts.with_emoji + source.answers.with_emoji),
        )
    return table


def _print_bad_rows(console: Console, sources: list[SourceStats]) -> None:
    if not any(source.counts.unusable for source in sources):
        return
    table = _table("Rows that give no record", ("source", "kind", "reason"), ("rows",))
    table.add_column("first of them")
    for source in sources:
        for reason, number in source.counts.unusable.most_common():
            samples = source.counts.samples.get(reason, [])
            table.add_row(
                Text(_name(source)),
                "bad" if reason in source.counts.bad else "left out",
                Text(visible(reason)),
                str(number),
                Text("\n".join(map(visible, samples)), style="yellow"),
            )
    console.print(table)


def _stages(stats: DataStats) -> Table:
    table = _table("Stages", ("stage", "source"), ("train", "held out"))
    table.add_column("left out of the stage, and cut")
    for name, stage in stats.stages.items():
        if stage.counts is None:
            table.add_row(name, "-", "-", "-", Text("see below", style="red"))
            continue
        lost = [f"{n} {visible(reason)}" for reason, n in left_out(stage)]
        lost += [f"{stage.counts.repeated} more by weight"] if stage.counts.repeated else []
        rows = [
            (Text(visible(source)), str(train), str(held))
            for source, (train, held) in stage.by_source.items()
        ]
        if len(rows) > 1:
            total = (Text("all"), str(stage.counts.train), str(stage.counts.evaluation))
            rows.insert(0, total)
        for number, row in enumerate(rows):
            first = number == 0
            table.add_row(
                name if first else "", *row, Text("\n".join(lost) or "-") if first else ""
            )
    return table


def left_out(stage: StageStats) -> list[tuple[str, int]]:
    """Returns (reason, rows) of what a stage lost or cut, before and after tokens."""
    assert stage.counts is not None
    return [*stage.counts.dropped.most_common(), *stage.encoded.most_common()]


def measured(stage: StageStats) -> list[tuple[str, Lengths]]:
    """Returns (part, lengths) of a stage, whole rows last; of PPO the prompts are the rows."""
    if not stage.rows.counts:
        return []
    parts = [(part, lengths) for part, lengths in stage.lengths.items() if part != "prompt"]
    prompts = [("prompt", stage.lengths["prompt"])]
    return [*prompts, *parts, ("whole row", stage.rows)] if parts else [("prompt", stage.rows)]


def _lengths(
    stats: DataStats, percents: Sequence[int], *, numbers: bool, spread: bool, ascii_only: bool
) -> Table:
    of = f" of {visible(stats.model)}" if stats.model else ""
    title = f"Lengths in {stats.unit}{of}, before anything is cut" if numbers else ""
    table = _table(title, ("stage", "part"))
    names = ("texts", "mean", *(f"p{percent}" for percent in percents), "max") if numbers else ()
    for name in (*names, *(("over limit",) if spread else ())):
        table.add_column(name, justify="right", no_wrap=True)
    if spread:
        table.add_column("from shortest to p99 and above", no_wrap=True)
    for name, stage in stats.stages.items():
        for part, lengths in measured(stage):
            cells: list[str | Text] = []
            if numbers:
                values = [lengths.percentile(percent) for percent in percents]
                cells += [str(lengths.total), f"{lengths.mean:.1f}"]
                cells += map(str, [*values, max(lengths.counts)])
            if spread:
                over = ""
                if lengths is stage.rows and stage.limit is not None:
                    over = f"{share(lengths.above(stage.limit), lengths.total)} > {stage.limit}"
                cells += [over, Text(histogram_line(lengths, ascii_only=ascii_only))]
            table.add_row(name, part, *cells)
    return table


def _bias(stats: DataStats) -> Table:
    table = _table("Is the longer answer the chosen one?", ("source",))
    for name in ("longer chosen", "shorter chosen", "same length", "mean chosen", "mean rejected"):
        table.add_column(name, justify="right")
    for stage in stats.stages.values():
        for source, bias in stage.bias.items():
            table.add_row(Text(visible(source)), *bias_cells(bias))
    return table


def bias_cells(bias: LengthBias) -> tuple[str, ...]:
    """Returns the counts of one source; shares are of pairs of different lengths."""
    different = bias.longer + bias.shorter
    pairs = max(bias.pairs, 1)
    return (
        share(bias.longer, different),
        share(bias.shorter, different),
        str(bias.equal),
        f"{bias.chosen_sum / pairs:.1f}",
        f"{bias.rejected_sum / pairs:.1f}",
    )
