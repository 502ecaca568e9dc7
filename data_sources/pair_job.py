"""One make-pairs job: load the model, get prompts, sample, rank, write. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_sources.jsonl_files import write_jsonl
from data_sources.make_pairs import (
    AnswerSource,
    PairCounts,
    PairSettings,
    evaluation_rows,
    training_rows,
)
from data_sources.openings import Opening, SampleIds, file_openings, self_openings
from rlhf_app.config.schema import ChatFormat as ChatFormatName
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.generator import Generator
from rlhf_app.hybrid_engine.sampling import SamplingParams
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.load import eos_token_ids, load_causal_lm, model_max_length, resolve_dtype
from rlhf_app.models.tokenizer import load_tokenizer, tokenizer_hash
from rlhf_app.scorers import Scorer

# Openings and answers have random streams of their own.
_OPENING_STEP, _ANSWER_STEP = 0, 1


@dataclass(frozen=True, slots=True)
class PairJob:
    """Everything that `rlhf data make-pairs` was asked for.

    Attributes:
        model: directory or Hub id of the causal LM that answers.
        scorer: ranks the answers.
        out: file of the training rows.
        eval_out: file of the held-out prompts, or None to hold none out.
        eval_prompts: how many prompts go there.
        prompts: data file, or None: the model writes the prompts.
        self_prompts: how many it writes, the held-out ones included.
        prompt_tokens: tokens of each of those.
        num_answers: answers to each prompt.
        settings: what is made of them.
        max_new_tokens, temperature, top_k, top_p: of the answers.
        no_eos: stop tokens are never sampled; every answer has max_new_tokens.
        chat_format: renders the prompts of a file.
        seed: of all sampling.
        batch_size: answers decoded at once.
    """

    model: str
    scorer: Scorer
    out: Path
    eval_out: Path | None
    eval_prompts: int
    prompts: Path | None
    self_prompts: int
    prompt_tokens: int
    num_answers: int
    settings: PairSettings
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    no_eos: bool
    chat_format: ChatFormatName
    seed: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class PairReport:
    """What was made.

    Attributes:
        train, evaluation: counts of the two files; evaluation is None where none was asked for.
        too_long: prompts of the file that leave no room for an answer.
        seconds: sampling and scoring the answers.
    """

    train: PairCounts
    evaluation: PairCounts | None
    too_long: int
    seconds: float


def run_pair_job(job: PairJob, console: Console) -> PairReport:
    """Makes the files; both are written after everything was sampled and scored.

    Args:
        job: what is wanted.
        console: shows progress.

    Raises:
        ConfigError: a model, file, prompt or scorer that cannot be used.
    """
    tokenizer = load_tokenizer(job.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_causal_lm(
        job.model, dtype=resolve_dtype("auto", device), device=device, setting="--model"
    ).eval()
    fmt = ChatFormat(tokenizer, job.chat_format, eos_token_ids(model))
    generator = Generator(model)

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        openings, too_long = _openings(job, fmt, generator, model, progress)
        held_out = _held_out(job, len(openings))
        task = progress.add_task("prompts answered", total=len(openings))
        source = AnswerSource(
            _sampler(generator, _answer_params(job, fmt)),
            fmt,
            job.scorer,
            job.num_answers,
            job.batch_size,
            advance=lambda done: progress.advance(task, done),
        )
        name, split = tokenizer_hash(tokenizer), len(openings) - held_out
        train, evaluation = PairCounts(), PairCounts()
        start = time.perf_counter()
        training = list(
            training_rows(source.answer(openings[:split], 0, train), job.settings, name, train)
        )
        held = source.answer(openings[split:], split, evaluation)
        evaluating = list(evaluation_rows(held, job.settings, name, evaluation))
        seconds = time.perf_counter() - start
    if not training:
        raise ConfigError(
            f"--min-gap {job.settings.min_gap:g}: no prompt has two usable answers whose scores "
            "differ by more; lower it, or sample more --num-answers"
        )
    write_jsonl(job.out, training)
    if job.eval_out is None:
        return PairReport(train, None, too_long, seconds)
    write_jsonl(job.eval_out, evaluating)
    return PairReport(train, evaluation, too_long, seconds)


def _openings(
    job: PairJob, fmt: ChatFormat, generator: Generator, model: Any, progress: Progress
) -> tuple[list[Opening], int]:
    positions = model_max_length(model.config)
    room = positions - job.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"--max-new-tokens {job.max_new_tokens}: {job.model} has {positions} positions, "
            "which leaves no room for a prompt"
        )
    if job.prompts is not None:
        return file_openings(job.prompts, fmt, room)
    if 1 + job.prompt_tokens > room:
        raise ConfigError(
            f"--prompt-tokens {job.prompt_tokens} and --max-new-tokens {job.max_new_tokens} "
            f"exceed the {positions} positions of {job.model}"
        )
    bos = fmt.tokenizer.bos_token_id
    if bos is None:
        raise ConfigError(
            f"--self-prompts: the tokenizer of {job.model} has no BOS token to start from; "
            "give --prompts FILE"
        )
    special = {*fmt.tokenizer.all_special_ids, *fmt.stop_ids}
    params = SamplingParams(
        max_new_tokens=job.prompt_tokens,
        suppress_ids=tuple(sorted(special)),
        seed=job.seed,
        step=_OPENING_STEP,
    )
    sample = _sampler(generator, params)
    task = progress.add_task("openings sampled", total=job.self_prompts)
    openings = []
    for opening in self_openings(sample, fmt, bos, job.self_prompts, job.batch_size):
        openings.append(opening)
        progress.advance(task)
    return openings, 0


def _held_out(job: PairJob, prompts: int) -> int:
    if job.eval_out is None:
        return 0
    if job.eval_prompts >= prompts:
        raise ConfigError(
            f"--eval-prompts {job.eval_prompts}: there are only {prompts} prompts, and some are "
            "needed for --out; hold out fewer"
        )
    return job.eval_prompts


def _answer_params(job: PairJob, fmt: ChatFormat) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=job.max_new_tokens,
        temperature=job.temperature,
        top_k=job.top_k,
        top_p=job.top_p,
        stop_ids=() if job.no_eos else fmt.stop_ids,
        suppress_ids=fmt.stop_ids if job.no_eos else (),
        seed=job.seed,
        step=_ANSWER_STEP,
    )


def _sampler(generator: Generator, params: SamplingParams) -> SampleIds:
    def sample(prompts: Sequence[Sequence[int]], uids: Sequence[int]) -> list[list[int]]:
        return generator.rollout(prompts, params, uids).tokens

    return sample
