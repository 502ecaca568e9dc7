"""Builds the embedded default: base model and data, all from one seed, with no network."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from data_sources.embedded import grammar
from data_sources.embedded.gold import gold

SFT_ROWS = 12000
PAIR_ROWS = 6000
PROMPT_ROWS = 6000
EVALUATION_ROWS = 256
HELD_OUT_SHARE = 0.15  # of all pairs of things: no held-out prompt asks about a trained pair
LEAST_GAP = 0.15  # of gold between chosen and rejected
LABEL_NOISE = 0.05  # of the training pairs are swapped; the evaluation's are not

_MARKER = "built.json"
_VERSION = 1  # raise it when the same seed gives other files


@dataclass(frozen=True, slots=True)
class EmbeddedTask:
    """Where the embedded default lies.

    Attributes:
        actor: directory of the untrained base model.
        sft: JSONL rows of prompt and response, of mixed quality.
        pairs: JSONL rows of prompt, chosen, rejected.
        prompts: JSONL rows of prompt.
        evaluation: held-out JSONL rows of prompt, response, chosen, rejected.
        gold: the independent score as `module:function`.
    """

    actor: Path
    sft: Path
    pairs: Path
    prompts: Path
    evaluation: Path
    gold: str = "data_sources.embedded:gold"


def prepare(directory: Path, seed: int) -> EmbeddedTask:
    """Builds the task in `directory`, or finds it there already built from this seed.

    The directory appears whole or not at all: everything is written beside it, then renamed.

    Args:
        directory: where the files go; what another seed left there is replaced.
        seed: of the weights and all data; the same seed gives the same bytes.

    Returns:
        The paths of the files.
    """
    task = _task(directory)
    stamp = json.dumps({"version": _VERSION, "seed": seed})
    marker = directory / _MARKER
    if marker.is_file() and marker.read_text(encoding="utf-8") == stamp:
        return task
    # Only this needs torch, and takes seconds to import it.
    from data_sources.embedded.base_model import build_base_model

    temporary = directory.with_name(f"{directory.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        build_base_model(temporary / task.actor.name, seed)
        for path, rows in _data(task, seed):
            _write_jsonl(temporary / path.name, rows)
        (temporary / marker.name).write_text(stamp, encoding="utf-8")
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return task


def find(directory: Path) -> EmbeddedTask | None:
    """The task that lies in `directory`, of whatever seed; None without one of this version."""
    try:
        built = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _task(directory) if built.get("version") == _VERSION else None


def _task(directory: Path) -> EmbeddedTask:
    return EmbeddedTask(
        actor=directory / "base",
        sft=directory / "sft.jsonl",
        pairs=directory / "pairs.jsonl",
        prompts=directory / "prompts.jsonl",
        evaluation=directory / "evaluation.jsonl",
    )


def _data(task: EmbeddedTask, seed: int) -> Iterator[tuple[Path, Iterable[Mapping[str, str]]]]:
    """Yields each file with its rows; every file has its own random stream."""
    pairs = grammar.thing_pairs(Random(f"{seed} split"))
    held_out = pairs[: int(len(pairs) * HELD_OUT_SHARE)]
    trained = pairs[len(held_out) :]

    rng = Random(f"{seed} sft")
    sft = islice(grammar.questions(rng, trained), SFT_ROWS)
    yield task.sft, ({"prompt": q.text, "response": grammar.answer(rng, q)} for q in sft)

    rng = Random(f"{seed} pairs")
    asked = islice(grammar.questions(rng, trained), PAIR_ROWS)
    yield task.pairs, (_pair(rng, question, LABEL_NOISE) for question in asked)

    rng = Random(f"{seed} prompts")
    asked = islice(grammar.questions(rng, trained), PROMPT_ROWS)
    yield task.prompts, ({"prompt": question.text} for question in asked)

    rng = Random(f"{seed} evaluation")
    unasked = _unique(grammar.questions(rng, held_out), EVALUATION_ROWS)
    yield (
        task.evaluation,
        (
            {"prompt": q.text, "response": grammar.answer(rng, q), **_pair(rng, q, noise=0.0)}
            for q in unasked
        ),
    )


def _unique(questions: Iterator[grammar.Question], count: int) -> Iterator[grammar.Question]:
    seen: set[str] = set()
    while len(seen) < count:
        question = next(questions)
        if question.text not in seen:
            seen.add(question.text)
            yield question


def _pair(rng: Random, question: grammar.Question, noise: float) -> dict[str, str]:
    """Draws two answers until gold tells them apart; the labels are swapped at rate `noise`."""
    while True:
        answers = [grammar.answer(rng, question) for _ in range(2)]
        scores = gold([question.text] * 2, answers)
        if abs(scores[0] - scores[1]) >= LEAST_GAP:
            break
    if (scores[0] < scores[1]) != (rng.random() < noise):
        answers.reverse()
    return {"prompt": question.text, "chosen": answers[0], "rejected": answers[1]}


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
