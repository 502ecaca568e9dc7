"""`rlhf bench generate`: tokens/s of rollouts, beside the machine's limit and HF generate."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_app.commands import bench_options as shared
from rlhf_app.commands import options
from rlhf_app.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_app.bench.generate import GenerateWork
    from rlhf_app.config.schema import RunConfig

_BATCH_SIZES, _SLOTS, _REQUESTS = "32,128,512", "128,512", 1024
_ON_GPU, _ON_CPU = "opt-1.3b", "tiny"


def generate(
    model: shared.Model = None,
    shape: shared.Shape = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option("--batch-sizes", help=f"Answers made side by side (default: {_BATCH_SIZES})."),
    ] = None,
    prompt_tokens: shared.PromptTokens = 256,
    answer_tokens: shared.AnswerTokens = 256,
    answer_lengths: shared.AnswerLengths = "fixed",
    requests: Annotated[
        int | None,
        typer.Option("--requests", help=f"Answers of varied lengths (default: {_REQUESTS:,})."),
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option("--slots", help=f"Of these, decoded at once (default: {_SLOTS})."),
    ] = None,
    dtype: shared.Dtype = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="Of the draws.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Likeliest tokens kept; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Probability mass kept.")] = 1.0,
    hf: Annotated[
        bool, typer.Option("--hf/--no-hf", help="Compare with transformers' own generate.")
    ] = True,
    profile: Annotated[
        bool, typer.Option("--profile/--no-profile", help="Split a decode step by kernel.")
    ] = True,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed runs; the median counts.")] = 3,
    as_json: shared.Json = None,
    seed: options.Seed = None,
    debug: options.Debug = False,
    set_values: options.SetValues = None,
) -> None:
    """Tokens/s of rollouts on this machine, beside its own limit and HF generate."""
    from rlhf_app.bench.lengths import parse_lengths
    from rlhf_app.bench.shapes import check_shape

    lengths = parse_lengths(answer_lengths)
    varied = lengths.mean is not None
    _check_kind(varied, batch_sizes, requests, slots)
    flag = "--slots" if varied else "--batch-sizes"
    given = slots if varied else batch_sizes
    sizes = shared.parse_counts(given or (_SLOTS if varied else _BATCH_SIZES), flag)
    shared.check_counts(
        {
            "--prompt-tokens": prompt_tokens,
            "--answer-tokens": answer_tokens,
            "--requests": _REQUESTS if requests is None else requests,
            "--repeats": repeats,
        }
    )
    shared.check_json(as_json)
    _check_draws(temperature, top_k, top_p)
    if model == "":
        raise ConfigError("--model is empty: give a directory or Hub id")
    if model is not None and shape is not None:
        raise ConfigError(f"--model {model} and --shape {shape} are both given: give one of them")
    if shape is not None:
        shape = check_shape(shape, "--shape")
    elif model is None:
        shape = _ON_GPU if shared.on_gpu() else _ON_CPU
    config = shared.resolve(
        model or f"shape:{shape}",
        [("--dtype", dtype, "model.dtype"), ("--seed", seed, "seed")],
        set_values or [],
    )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler tells when it starts
    # After the checks: this imports torch.
    from rlhf_app.bench.generate import GenerateWork
    from rlhf_app.hybrid_engine import SamplingParams

    work = GenerateWork(
        batch_sizes=sizes,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        lengths=lengths,
        requests=requests or _REQUESTS,
        params=SamplingParams(
            max_new_tokens=answer_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
            seed=config.seed,
        ),
        hf=hf,
        profile=profile,
        repeats=repeats,
        seed=config.seed,
    )
    shared.end(_measure(config, shape, work, as_json))


def _check_draws(temperature: float, top_k: int, top_p: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"--temperature {temperature:g}: give a number above 0, or --greedy")
    if top_k < 0:
        raise ConfigError(f"--top-k {top_k}: give 0 (all tokens) or more")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p:g}: give a number above 0, at most 1")


def _check_kind(
    varied: bool, batch_sizes: str | None, requests: int | None, slots: str | None
) -> None:
    if varied and batch_sizes is not None:
        raise ConfigError("--batch-sizes belongs to --answer-lengths fixed: give --slots")
    for flag, value in (("--slots", slots), ("--requests", requests)):
        if not varied and value is not None:
            raise ConfigError(f"{flag} belongs to --answer-lengths geometric:MEAN: give both")


def _measure(
    config: RunConfig, shape: str | None, work: GenerateWork, as_json: str | None
) -> list[str]:
    """Loads, measures, prints; one line for each row that failed."""
    from rlhf_app.bench.generate import bench_generate
    from rlhf_app.report.bench_tables import print_generate

    with shared.memory_errors(shape or "--model"):
        name, model = _model(config, shape, work)
    report = bench_generate(name, model, work, config.hybrid_engine, shared.say)
    shared.write(report.as_dict(), as_json, lambda console: print_generate(console, report))
    return report.errors


def _model(config: RunConfig, shape: str | None, work: GenerateWork) -> tuple[str, Any]:
    """The model to measure, and its name."""
    from rlhf_app.models.load import load_causal_lm, load_config, resolve_dtype

    device = shared.device()
    settings = config.model
    dtype = resolve_dtype(settings.dtype, device)
    lengths = work.prompt_tokens, work.answer_tokens
    if shape is not None:
        from rlhf_app.bench.random_models import random_causal_lm
        from rlhf_app.bench.shapes import config_of

        hf_config = config_of(shape)
        shared.check_positions(hf_config, shape, *lengths)
        return f"{shape} with random weights", random_causal_lm(hf_config, dtype, device).eval()
    assert settings.actor is not None
    path, trust = settings.actor, settings.trust_remote_code
    hf_config = load_config(path, trust_remote_code=trust, setting="--model")
    shared.check_positions(hf_config, path, *lengths)
    model = load_causal_lm(
        path,
        dtype=dtype,
        device=device,
        attn_implementation=settings.attn_implementation,
        trust_remote_code=trust,
        setting="--model",
    )
    return path, model.eval()
