"""`rlhf data inspect`: what a model will really see of your data.

Prints the shape found in each source, what became of every row, how rows divide over the
stages, and a few rows as text and tokens, with the tokens that carry loss marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_app.commands import data_options as options

if TYPE_CHECKING:
    from rich.console import Console

    from data_sources.counts import DataCounts, SourceCounts
    from data_sources.records import Record
    from data_sources.seen import StageView
    from data_sources.stage_data import StageData
    from rlhf_app.config.schema import StageName


def inspect(
    data: options.Data = None,
    sft_data: options.SftData = None,
    reward_data: options.RewardData = None,
    ppo_data: options.PpoData = None,
    eval_data: options.EvalData = None,
    model: options.Model = None,
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            metavar="sft|reward|ppo",
            help="Whose rows to show; unset: the first that has some.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Rows to show.")] = 3,
    data_split: options.DataSplit = None,
    chat_format: options.ChatFormatName = None,
    max_length: options.MaxLength = None,
    config_file: options.ConfigFile = None,
    set_values: options.SetValues = None,
    debug: options.Debug = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colours; marks show the mask alone.")
    ] = False,
) -> None:
    """Show what the model will see: shapes, counts, texts, tokens and masks."""
    from rich.console import Console
    from rich.text import Text

    from data_sources.reading_once import ReadOnce
    from data_sources.source_readers import reader_of
    from data_sources.stage_data import load_stage_data
    from rlhf_app.config.schema import STAGES
    from rlhf_app.errors import ConfigError
    from rlhf_app.report.visible import visible

    del debug  # for who prints errors
    name: StageName | None = next((s for s in STAGES if s == stage), None)
    if name is None and stage is not None:
        raise ConfigError(f"--stage {stage} is no stage; use one of {', '.join(STAGES)}")
    config = options.data_config(
        config_file,
        set_values,
        data=data,
        sft_data=sft_data,
        reward_data=reward_data,
        ppo_data=ppo_data,
        eval_data=eval_data,
        actor_model=model,
        data_split=data_split,
        chat_format=chat_format,
        max_length=max_length,
    )
    console = Console(highlight=False, no_color=no_color or None)
    # Everything readable is shown; a run refuses sources with many bad rows.
    read = ReadOnce(reader_of(config, to_look=True))
    read.read_all(config)
    refusals = read.refusals(config.data.max_bad_fraction)

    results: dict[StageName, StageData] = {}
    problems: dict[StageName, str] = {}
    for one in STAGES:
        try:
            results[one] = load_stage_data(config, one, read)
        except ConfigError as error:
            problems[one] = str(error)
    name = name or next(iter(results), None)
    if read.loaded:
        _print_sources(console, [counts for _, counts in read.loaded])
        _print_stages(console, {one: result.counts for one, result in results.items()})
    last_is_source = bool(refusals)
    if refusals:
        last = refusals.pop(0)
    elif not results or name in problems:
        last = problems[name or STAGES[0]]
    else:
        last = ""
    # Where no stage can start for want of a source, theirs are no news.
    shown = [*refusals, *(problems.values() if results or not last_is_source else ())]
    for problem in dict.fromkeys(text for text in shown if text != last):
        console.print(Text(visible(problem), style="red"))

    if name in results:
        records = list(islice(results[name].train, limit))
    else:
        records = list(islice(chain.from_iterable(table for table, _ in read.loaded), limit))
    actor = config.model.actor
    view = options.stage_views(config, actor)[name] if actor and name in results else None
    # What no stage gets is shown as it was read.
    kind = f"{name} row" if name in results else "record"
    for number, record in enumerate(records, 1):
        console.rule(f"{kind} {number} (uid {record.uid}, {visible(record.source)})")
        if view is None:
            _print_text(console, record)
        else:
            _print_tokens(console, record, view)
    if last:
        raise ConfigError(last)


def _print_sources(console: Console, sources: list[SourceCounts]) -> None:
    from rich.table import Table
    from rich.text import Text

    from rlhf_app.report.visible import visible

    table = Table("source", "shape", title="Sources")
    for heading in ("rows", "usable", "records"):
        table.add_column(heading, justify="right")
    table.add_column("left out, and remarks")
    for counts in sources:
        remarks = [f"{n} {reason}" for reason, n in counts.unusable.most_common()]
        remarks += [f"{n} {note}" for note, n in counts.notes.most_common()]
        remarks += counts.looks
        cells = (counts.path, counts.shape, "\n".join(remarks) or "-")
        path, shape, lost = (Text(visible(cell)) for cell in cells)
        table.add_row(path, shape, str(counts.read), str(counts.usable), str(counts.records), lost)
    console.print(table)
    for counts in sources:
        for reason in counts.bad:
            for sample in counts.samples.get(reason, []):
                console.print(Text(visible(f"  {reason}: {sample}"), style="yellow"))


def _print_stages(console: Console, results: Mapping[StageName, DataCounts]) -> None:
    from rich.table import Table
    from rich.text import Text

    from rlhf_app.report.visible import visible

    table = Table("stage", title="Stages")
    for heading in ("given", "train", "evaluation"):
        table.add_column(heading, justify="right")
    table.add_column("left out")
    for stage, counts in results.items():
        part = counts.stages[stage]
        lost = [f"{n} {reason}" for reason, n in part.dropped.most_common()]
        lost += [f"{part.repeated} more by weight"] if part.repeated else []
        table.add_row(
            stage,
            str(part.candidates),
            str(part.train),
            str(part.evaluation),
            Text(visible("\n".join(lost) or "-")),
        )
    if results:
        console.print(table)


def _print_text(console: Console, record: Record) -> None:
    from rich.text import Text

    from rlhf_app.report.visible import visible

    for message in record.messages:
        heading = "prompt" if record.rendered else message.role
        console.print(Text(f"{heading}: ", style="bold cyan") + Text(visible(message.content)))
    for label in ("response", "chosen", "rejected"):
        value = getattr(record, label)
        if value is not None:
            console.print(Text(f"{label}: ", style="bold green") + Text(visible(value)))


def _print_tokens(console: Console, record: Record, view: StageView) -> None:
    """Prints one row as the stage gets it, or why the stage leaves it out."""
    from rich.text import Text

    from rlhf_app.report.token_marks import marked_text

    texts, reasons = view.of(record)
    whole = {text.label: len(text.ids) for text in view.whole(record)} if reasons else {}
    for text in texts:
        marked = sum(end - start for start, end in text.marked)
        console.print(Text(f"{text.label}: {len(text.ids)} tokens, {marked} marked", style="bold"))
        lost = whole.get(text.label, len(text.ids)) - len(text.ids)
        cut_end = lost > 0 and view.truncation == "right"
        shown = marked_text(text.ids, text.marked, view.fmt.tokenizer, cut=lost, cut_end=cut_end)
        console.print(shown)
    for reason in reasons:
        console.print(f"{reason} ({view.limit})")
