"""The measurement behind `rlhf bench generate`: one model, several batch sizes."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

import torch

from rlhf_app.bench.hf_generate import run_hf
from rlhf_app.bench.lengths import AnswerLengths
from rlhf_app.bench.limits import (
    DecodeLimit,
    Machine,
    ModelCost,
    fixed_decode_limit,
    prefill_seconds,
    varied_decode_limit,
)
from rlhf_app.bench.machine import device_name, measure_machine
from rlhf_app.bench.model_cost import model_cost
from rlhf_app.bench.step_split import seconds_of, split_decode_step
from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import Generator, Rollout, SamplingParams
from rlhf_app.hybrid_engine.memory_use import memory_use, reset_peak
from rlhf_app.hybrid_engine.refill import ideal_refill
from rlhf_app.report.bench_generate import EngineRun, GenerateReport, Limit, Row, StepSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateWork:
    """What is generated.

    Attributes:
        batch_sizes: answers made side by side, one row each; of varied lengths: slots.
        prompt_tokens: of every prompt.
        answer_tokens: most of an answer.
        lengths: of the answers.
        requests: answers where lengths vary.
        params: how tokens are drawn.
        hf: compare with transformers' generate.
        profile: split a decode step by kernel.
        repeats: timed rollouts of each row, after one that sets up.
        seed: of prompts and lengths.
    """

    batch_sizes: tuple[int, ...]
    prompt_tokens: int
    answer_tokens: int
    lengths: AnswerLengths
    requests: int
    params: SamplingParams
    hf: bool
    profile: bool
    repeats: int
    seed: int = 0


def bench_generate(
    name: str,
    model: Any,
    work: GenerateWork,
    settings: HybridEngineSettings,
    say: Callable[[str], None],
) -> GenerateReport:
    """Measures every row; one that fails does not keep the others from being measured.

    Args:
        name: of the model, for the report.
        model: a causal LM on its device.
        work: what is generated.
        settings: of the engine.
        say: takes a line of progress.
    """
    device, dtype = model.device, model.dtype
    say("measuring read bandwidth and peak")
    machine = measure_machine(device, dtype)
    cost = model_cost(model)
    report = GenerateReport(
        model=model_facts(name, model),
        device={"name": device_name(device), **asdict(machine)},
        cost={**asdict(cost), "kv_bytes_per_token": cost.kv_bytes(1)},
        work={**asdict(work), "lengths": asdict(work.lengths), "engine": settings.model_dump()},
    )
    # With reference cycles in it a model's memory comes back late: between rows it must be there.
    for size in work.batch_sizes:
        say(f"{size} rows of {work.prompt_tokens} + {work.answer_tokens} tokens")
        report.rows.append(_measured(model, size, work, settings, cost, machine))
    return report


def model_facts(name: str, model: Any) -> dict[str, Any]:
    """Of the model, for the report."""
    return {
        "name": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocabulary": model.config.get_text_config(decoder=True).vocab_size,
    }


def _measured(
    model: Any,
    size: int,
    work: GenerateWork,
    settings: HybridEngineSettings,
    cost: ModelCost,
    machine: Machine,
) -> Row:
    varied = work.lengths.mean is not None
    row = Row(requests=work.requests if varied else size, slots=size)
    answers = work.lengths.draw(row.requests, work.answer_tokens, work.seed)
    prompts = random_prompts(model, row.requests, work.prompt_tokens, work.seed)
    with _freed(model.device), out_of_memory(row, "engine"):
        generator = Generator(model, settings)
        limits = {"limits": answers} if varied else {}

        def run() -> Rollout:
            return generator.rollout(prompts, work.params, max_slots=size, **limits)

        try:
            row.engine = _run_engine(run, generator, row, work.repeats)
            row.limit = _limit(cost, machine, work, answers, size)
            if varied:
                row.ideal_steps = row.limit.steps
            if work.profile:
                row.split, row.split_missing = _split(run, row.engine, model.device)
        finally:
            generator.release()
    if work.hf and not varied and not row.error:
        with _freed(model.device), out_of_memory(row, "HF generate"):
            row.hf = run_hf(model, prompts, work.params, cost, work.repeats)
    return row


def random_prompts(model: Any, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Distinct prompts of one length: equal ones would share their prefill."""
    vocabulary = model.get_input_embeddings().num_embeddings
    source = random.Random(seed)
    return [[source.randrange(vocabulary) for _ in range(tokens)] for _ in range(count)]


def _run_engine(
    run: Callable[[], Rollout], generator: Generator, row: Row, repeats: int
) -> EngineRun:
    device = generator.model.device
    first, _ = seconds_of(run, device)
    reset_peak(device)
    runs = [seconds_of(run, device) for _ in range(repeats)]
    total = median_low(seconds for seconds, _ in runs)
    timings = next(rollout.timings for seconds, rollout in runs if seconds == total)
    return EngineRun(
        prefill_seconds=timings.prefill_seconds,
        decode_seconds=timings.decode_seconds,
        total_seconds=total,
        all_seconds=[seconds for seconds, _ in runs],
        first_seconds=first,
        generated_tokens=timings.generated_tokens,
        decode_tokens=timings.generated_tokens - row.requests,
        decode_steps=timings.decode_steps,
        slots=row.slots,
        form=timings.form,
        peak_bytes=memory_use(device)[1],
        workspace_bytes=generator.workspace_bytes,
    )


def _limit(
    cost: ModelCost, machine: Machine, work: GenerateWork, answers: list[int], slots: int
) -> Limit:
    decode: DecodeLimit
    if work.lengths.mean is None:
        decode = fixed_decode_limit(cost, machine, slots, work.prompt_tokens, work.answer_tokens)
        steps = work.answer_tokens - 1
    else:
        decode = varied_decode_limit(cost, machine, work.prompt_tokens, answers, slots)
        steps = ideal_refill(answers, slots)
    prefill = prefill_seconds(cost, machine, len(answers), work.prompt_tokens)
    return Limit(decode.kv_seconds, decode.gemm_seconds, decode.weight_seconds, prefill, steps)


def _split(
    run: Callable[[], Rollout], engine: EngineRun, device: torch.device
) -> tuple[StepSplit | None, str]:
    """The split of a step, or why there is none."""
    if engine.form.startswith("native"):
        return None, "transformers' generate ran"
    if engine.form.startswith("compiled"):
        return None, "compiled decode is one call, which torch.profiler does not see into"
    if not engine.decode_steps:
        return None, "prefill alone made the answers"
    step_seconds = engine.decode_seconds / engine.decode_steps
    return split_decode_step(run, device, engine.decode_steps, step_seconds), ""


@contextmanager
def _freed(device: torch.device) -> Iterator[None]:
    """Starts with the memory that earlier measurements left cached."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    yield


@contextmanager
def out_of_memory(row: Row, what: str) -> Iterator[None]:
    """Turns an error of too little memory into the row's error line."""
    try:
        yield
    except RuntimeError as error:
        line = out_of_memory_line(error)
        if line is None:
            raise
        row.error = f"{row.slots} rows, {what}: {line}"


def out_of_memory_line(error: RuntimeError) -> str | None:
    """The error in one line, if it says that memory is not there."""
    text = " ".join(str(error).split())
    full = isinstance(error, torch.OutOfMemoryError) or text.startswith("KV workspace")
    if not full and "can't allocate memory" not in text:
        return None
    return f"out of memory: {text}"
