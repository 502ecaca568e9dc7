"""`rlhf data inspect`: what a model will really see of your data.

Prints the shape found in each source, what became of every row, how rows divide over the
stages, and a few rows as text and tokens, with the tokens that carry loss marked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from data_sources.counts import DataCounts, SourceCounts
    from data_sources.examples import SequenceExample
    from data_sources.records import Record
    from data_sources.stage_data import Reader, StageData
    from rlhf_app.config.schema import RunConfig, StageName
    from rlhf_app.models.chat_format import ChatFormat

_SOURCE_HELP = "repeatable; path or path=weight"
_DEFAULT_LENGTH = 512


def inspect(
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help=f"Data split over the stages ({_SOURCE_HELP})."),
    ] = None,
    sft_data: Annotated[
        list[str] | None, typer.Option("--sft-data", help="SFT rows instead.")
    ] = None,
    reward_data: Annotated[
        list[str] | None, typer.Option("--reward-data", help="Preference pairs instead.")
    ] = None,
    ppo_data: Annotated[
        list[str] | None, typer.Option("--ppo-data", help="PPO prompts instead.")
    ] = None,
    eval_data: Annotated[
        list[str] | None, typer.Option("--eval-data", help="Held-out rows of all stages.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--actor-model", "--model", help="Tokenizer to show tokens with; unset: text only."
        ),
    ] = None,
    stage: Annotated[
        str, typer.Option("--stage", metavar="sft|reward|ppo", help="Whose rows to show.")
    ] = "sft",
    limit: Annotated[int, typer.Option("--limit", min=0, help="Rows to show.")] = 3,
    data_split: Annotated[
        str | None, typer.Option("--data-split", help="Shares such as 2,4,4, or shared.")
    ] = None,
    chat_format: Annotated[
        str | None,
        typer.Option("--chat-format", metavar="auto|template|human_assistant|plain"),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=2, help="Tokens of prompt + response.")
    ] = None,
) -> None:
    """Show what the model will see: shapes, counts, texts, tokens and masks."""
    from rich.console import Console

    from data_sources.stage_data import load_stage_data
    from rlhf_app.config.load import validate
    from rlhf_app.config.schema import STAGES
    from rlhf_app.errors import ConfigError

    name: StageName | None = next((s for s in STAGES if s == stage), None)
    if name is None:
        raise ConfigError(f"--stage {stage} is no stage; use one of {', '.join(STAGES)}")
    given: dict[str, tuple[str, object]] = {
        "data.sources": ("--data", data),
        "data.sft": ("--sft-data", sft_data),
        "data.reward": ("--reward-data", reward_data),
        "data.ppo": ("--ppo-data", ppo_data),
        "data.eval": ("--eval-data", eval_data),
        "data.split": ("--data-split", data_split),
        "data.chat_format": ("--chat-format", chat_format),
        "data.max_length": ("--max-length", max_length),
        # Everything readable is shown; a run refuses sources with many unusable rows.
        "data.max_bad_fraction": ("", 1.0),
    }
    values = {key: value for key, (_, value) in given.items() if value}
    config = validate(values, {key: given[key][0] for key in values})
    console = Console(highlight=False)
    read, seen = _remembering(config)

    results: dict[str, StageData] = {}
    problems: dict[str, str] = {}
    for one in STAGES:
        try:
            results[one] = load_stage_data(config, one, read)
        except ConfigError as error:
            problems[one] = str(error)
    if not seen:
        raise ConfigError(problems[name])
    _print_sources(console, [counts for _, counts in seen.values()])
    _print_stages(console, {one: result.counts for one, result in results.items()}, problems)
    if name in results:
        records = results[name].train[:limit]
    else:
        records = [record for loaded, _ in seen.values() for record in loaded][:limit]
    fmt, tok_hash = _format(config, model)
    for number, record in enumerate(records, 1):
        console.rule(f"{name} row {number} (uid {record.uid}, {record.source})")
        if fmt is None:
            _print_text(console, record)
        else:
            _print_tokens(console, record, name, fmt, tok_hash, config)


def _remembering(
    config: RunConfig,
) -> tuple[Reader, dict[tuple[str, bool], tuple[list[Record], SourceCounts]]]:
    """Returns a reader that reads each source once for all stages, and what it has read."""
    from data_sources.stage_data import reader_of

    inner = reader_of(config)
    seen: dict[tuple[str, bool], tuple[list[Record], SourceCounts]] = {}

    def read(source: Any, evaluation: bool) -> tuple[list[Record], SourceCounts]:
        key = (source.path, evaluation)
        if key not in seen:
            seen[key] = inner(source, evaluation)
        return seen[key]

    return read, seen


def _format(config: RunConfig, model: str | None) -> tuple[ChatFormat | None, str]:
    if model is None:
        return None, ""
    from rlhf_app.models.chat_format import ChatFormat
    from rlhf_app.models.tokenizer import load_tokenizer, tokenizer_hash

    tokenizer = load_tokenizer(model)
    fmt = ChatFormat(tokenizer, config.data.chat_format, template_file=config.data.chat_template)
    return fmt, tokenizer_hash(tokenizer)


def _print_sources(console: Console, sources: list[SourceCounts]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("source", "shape", title="Sources")
    for heading in ("rows", "usable", "records"):
        table.add_column(heading, justify="right")
    table.add_column("left out, and remarks")
    for counts in sources:
        remarks = [f"{n} {reason}" for reason, n in counts.unusable.most_common()]
        remarks += [f"{n} {note}" for note, n in counts.notes.most_common()]
        cells = (counts.path, counts.shape, "\n".join(remarks) or "-")
        path, shape, lost = (escape(cell) for cell in cells)
        table.add_row(path, shape, str(counts.read), str(counts.usable), str(counts.records), lost)
    console.print(table)
    for counts in sources:
        for reason, samples in counts.samples.items():
            for sample in samples:
                console.print(f"  {escape(reason)}: {escape(sample)}", style="yellow")


def _print_stages(
    console: Console, results: dict[str, DataCounts], problems: dict[str, str]
) -> None:
    from rich.markup import escape
    from rich.table import Table

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
            escape("\n".join(lost)) or "-",
        )
    console.print(table)
    for problem in problems.values():
        console.print(escape(problem), style="red")


def _print_text(console: Console, record: Record) -> None:
    from rich.text import Text

    for message in record.messages:
        heading = "prompt" if record.rendered else message.role
        console.print(Text(f"{heading}: ", style="bold cyan") + Text(message.content))
    for label in ("response", "chosen", "rejected"):
        value = getattr(record, label)
        if value is not None:
            console.print(Text(f"{label}: ", style="bold green") + Text(value))


def _print_tokens(
    console: Console,
    record: Record,
    stage: StageName,
    fmt: ChatFormat,
    tok_hash: str,
    config: RunConfig,
) -> None:
    """Prints one row as the stage gets it, or why the stage leaves it out."""
    from data_sources.examples import pair_examples, prompt_examples, sft_examples

    length = config.data.max_length or _DEFAULT_LENGTH
    shown: list[tuple[str, SequenceExample]]
    if stage == "ppo":
        prompts, reasons = prompt_examples([record], fmt, tok_hash, config.ppo.max_prompt_length)
        for prompt in prompts:
            _print_ids(console, "prompt", prompt.input_ids, len(prompt.input_ids), fmt)
        shown = []
    elif stage == "reward":
        pairs, reasons = pair_examples([record], fmt, tok_hash, length)
        shown = [(side, getattr(p, side)) for p in pairs for side in ("chosen", "rejected")]
    else:
        examples, reasons = sft_examples([record], fmt, tok_hash, length)
        shown = [("answer", example) for example in examples]
    for label, example in shown:
        _print_ids(console, label, example.input_ids, example.response_start, fmt)
    for reason in reasons:
        console.print(f"{reason} ({length if stage != 'ppo' else config.ppo.max_prompt_length})")


def _print_ids(
    console: Console, label: str, ids: list[int], response_start: int, fmt: ChatFormat
) -> None:
    """Prints tokens; the marked ones, between >>> and <<<, carry loss or are scored."""
    from rich.text import Text

    marked = len(ids) - response_start
    text = Text(f"{label}: {len(ids)} tokens, {marked} marked\n", style="bold")
    for i, piece in enumerate(_pieces(ids, fmt)):
        if i == response_start:
            text.append(">>>", style="bold magenta")
        # Shades alternate, so that the borders of tokens show.
        shades = ("green", "bold bright_green") if i >= response_start else ("white", "cyan")
        text.append(piece, style=shades[i % 2])
    if marked:
        text.append("<<<", style="bold magenta")
    console.print(text)


def _pieces(ids: list[int], fmt: ChatFormat) -> list[str]:
    """Returns what each token adds to the decoded text.

    A token alone decodes to less than it means: blanks and parts of characters are lost. The
    whole is decoded instead, token by token; a character split over tokens shows at its last.
    """
    pieces, before = [], ""
    for end in range(1, len(ids) + 1):
        after = fmt.tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        complete = after.rstrip("\ufffd")
        pieces.append(complete[len(before) :] if complete.startswith(before) else "")
        before = complete if complete.startswith(before) else before
    return pieces
