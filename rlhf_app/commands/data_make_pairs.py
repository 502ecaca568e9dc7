"""`rlhf data make-pairs`: preference pairs out of a model's own answers."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_app.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from data_sources.make_pairs import PairCounts
    from data_sources.pair_job import PairReport

_PROMPTS, _SAMPLING, _PAIRS = "Prompts", "Sampling", "Pairs"
_FEW_ENDS = 0.05  # share of answers below which SFT learns no end from them


def make_pairs(
    model: Annotated[str, typer.Option("--model", help="Causal LM: directory or Hub id.")],
    scorer: Annotated[
        str, typer.Option("--scorer", help="module:function or file.py:function that ranks.")
    ],
    out: Annotated[Path, typer.Option("--out", help="File of the training rows (.jsonl).")],
    eval_out: Annotated[
        Path | None, typer.Option("--eval-out", help="File of the held-out prompts (.jsonl).")
    ] = None,
    eval_prompts: Annotated[
        int, typer.Option("--eval-prompts", min=1, help="Prompts held out for --eval-out.")
    ] = 256,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="Data file of any supported shape; unset: the model writes the prompts.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    self_prompts: Annotated[
        int | None,
        typer.Option(
            "--self-prompts",
            min=2,
            help="Openings sampled from BOS, held-out ones included (1024 without --prompts).",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            "--prompt-tokens", min=1, help="Tokens of an opening.", rich_help_panel=_PROMPTS
        ),
    ] = 16,
    chat_format: Annotated[
        str,
        typer.Option(
            "--chat-format",
            metavar="auto|template|human_assistant|plain",
            help="How prompts of a file are rendered.",
            rich_help_panel=_PROMPTS,
        ),
    ] = "auto",
    num_answers: Annotated[
        int,
        typer.Option(
            "--num-answers", min=1, help="Answers to each prompt.", rich_help_panel=_SAMPLING
        ),
    ] = 6,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", min=1, help="Most tokens of an answer.", rich_help_panel=_SAMPLING
        ),
    ] = 40,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Of the answers.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="0: all tokens.", rich_help_panel=_SAMPLING)
    ] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="1: all tokens.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    no_eos: Annotated[
        bool,
        typer.Option(
            "--no-eos",
            help="Never sample EOS: every answer has full length.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False,
    min_gap: Annotated[
        float,
        typer.Option(
            "--min-gap",
            min=0,
            help="A pair's scores differ by more than this.",
            rich_help_panel=_PAIRS,
        ),
    ] = 0.25,
    pairs_per_prompt: Annotated[
        str,
        typer.Option(
            "--pairs-per-prompt",
            metavar="N|all",
            help="Widest gaps first. All of them teach a graded score; 1, best against "
            "worst, only tells good from bad.",
            rich_help_panel=_PAIRS,
        ),
    ] = "all",
    best_of: Annotated[
        bool,
        typer.Option(
            "--best-of",
            help="Write the best answer as a response (SFT rows) in place of pairs.",
            rich_help_panel=_PAIRS,
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all sampling.")] = 1234,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Answers decoded at once.")
    ] = 192,
) -> None:
    """Sample answers, rank them with a scorer, write preference pairs."""
    from rich.console import Console

    from data_sources.jsonl_files import check_output_file
    from data_sources.make_pairs import PairSettings
    from rlhf_app.config.load import validate
    from rlhf_app.scorers import load_scorer

    # Everything that can be wrong is found before torch is imported.
    if prompts is not None and self_prompts is not None:
        raise ConfigError("--prompts and --self-prompts: give one of them")
    if num_answers < 2 and not best_of:
        raise ConfigError(f"--num-answers {num_answers}: a pair needs at least 2")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"--temperature {temperature}: give a number above 0")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p}: give a number in (0, 1]")
    check_output_file(out, "--out")
    if eval_out is not None:
        check_output_file(eval_out, "--eval-out")
        if eval_out.resolve() == out.resolve():
            raise ConfigError(f"--eval-out {eval_out}: is the file of --out; name another")
    settings = PairSettings(min_gap, _limit(pairs_per_prompt), best_of)
    checked = validate({"data.chat_format": chat_format}, {"data.chat_format": "--chat-format"})

    if prompts is not None and not prompts.exists():
        raise ConfigError(f"--prompts {prompts}: no such file")
    ranking = load_scorer(scorer)

    from data_sources.pair_job import PairJob, run_pair_job

    console = Console(highlight=False)
    report = run_pair_job(
        PairJob(
            model=model,
            scorer=ranking,
            out=out,
            eval_out=eval_out,
            eval_prompts=eval_prompts,
            prompts=prompts,
            self_prompts=self_prompts or 1024,
            prompt_tokens=prompt_tokens,
            num_answers=num_answers,
            settings=settings,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            no_eos=no_eos,
            chat_format=checked.data.chat_format,
            seed=seed,
            batch_size=batch_size,
        ),
        console,
    )
    _print_report(console, report, out, eval_out, settings.best_of)
    if not no_eos and report.train.ended_share < _FEW_ENDS:
        print(
            f"rlhf: warning: {1 - report.train.ended_share:.0%} of the answers were cut by "
            f"--max-new-tokens {max_new_tokens}: SFT on them does not learn to end, and PPO then "
            "takes ppo.missing_eos_penalty from every answer; raise --max-new-tokens, or train "
            "with ppo.stop_at_eos=false (and make the pairs with --no-eos)",
            file=sys.stderr,
        )


def _limit(text: str) -> int | None:
    if text == "all":
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigError(f"--pairs-per-prompt {text}: give a number above 0, or all")


def _cells(counts: PairCounts, best_of: bool) -> dict[str, str]:
    """Labels and values of one column of the table."""
    return {
        "prompts": f"{counts.prompts:,}",
        "answers": f"{counts.answers:,}",
        "tokens per answer": f"{counts.tokens / max(counts.answers, 1):.1f}",
        "answers with an end": f"{counts.ended_share:.1%}",
        "mean score": f"{counts.mean_score:.3f}",
        "mean score of the best": f"{counts.mean_best:.3f}",
        "text round trip": f"{counts.round_trip:.1%}",
        "left out, text changes": f"{counts.changed:,}",
        "left out, empty": f"{counts.empty:,}",
        "prompts skipped, small gap": f"{counts.small_gap:,}",
        "best answers or pairs kept" if best_of else "pairs kept": f"{counts.rows:,}",
    }


def _print_report(
    console: Console, report: PairReport, out: Path, eval_out: Path | None, best_of: bool
) -> None:
    from rich.table import Table

    parts = [("train", report.train)]
    if report.evaluation is not None:
        parts.append(("held out", report.evaluation))
    table = Table("", *(name for name, _ in parts), title="Answers and pairs")
    columns = [_cells(counts, best_of) for _, counts in parts]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    console.print(table)
    if report.too_long:
        console.print(f"{report.too_long} prompts were too long, and left out")
    counts = [counts for _, counts in parts]
    tokens = sum(part.tokens for part in counts) / max(report.seconds, 1e-9)
    answers = sum(part.answers for part in counts) / max(report.seconds, 1e-9)
    console.print(f"{report.seconds:.1f} s, {answers:,.0f} answers/s, {tokens:,.0f} tokens/s")
    for path in (out, eval_out):
        if path is not None:
            console.print(f"wrote {path}", soft_wrap=True, markup=False)
