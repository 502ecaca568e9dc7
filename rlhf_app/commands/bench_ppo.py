"""`rlhf bench ppo`: one PPO iteration on random models, phase by phase beside its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhf_app.commands import bench_options as shared
from rlhf_app.commands import options
from rlhf_app.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_app.bench.ppo import PPOBench
    from rlhf_app.config.schema import RunConfig

Generation = Literal["engine", "native", "both"]
_GENERATIONS = {
    "engine": ("engine",),
    "native": ("native",),
    "both": ("engine", "native"),
}
# The published recipe of DeepSpeed-Chat, and what runs on a CPU in seconds.
_ON_GPU = ("opt-1.3b", "opt-350m", 1024)
_ON_CPU = ("tiny", "tiny", 16)


def ppo(
    shape: Annotated[
        str | None,
        typer.Option("--shape", help=f"Of the actor (default: {_ON_GPU[0]}; tiny on a CPU)."),
    ] = None,
    critic_shape: Annotated[
        str | None,
        typer.Option(
            "--critic-shape",
            help=f"Of critic and reward model (default: {_ON_GPU[1]}; tiny on a CPU).",
        ),
    ] = None,
    rollout_batch: Annotated[
        int | None,
        typer.Option(
            "--rollout-batch",
            help=f"Answers of an iteration (default: {_ON_GPU[2]}; {_ON_CPU[2]} on a CPU).",
        ),
    ] = None,
    prompt_tokens: shared.PromptTokens = 256,
    answer_tokens: shared.AnswerTokens = 256,
    answer_lengths: shared.AnswerLengths = "fixed",
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", help="Sequences per forward (default: 8).")
    ] = None,
    micro_batch_tokens: Annotated[
        int | None,
        typer.Option("--micro-batch-tokens", help="Instead: tokens per forward."),
    ] = None,
    max_slots: Annotated[
        int | None,
        typer.Option("--max-slots", help="Answers decoded at once (default: as memory allows)."),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option("--lora-rank", help="Rank of adapters (default: none).")
    ] = None,
    zero_stage: Annotated[
        int | None, typer.Option("--zero-stage", help="ZeRO stage, 0-3 (default: 0).")
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute activations.")
    ] = False,
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Keep the optimizers' state on the host.")
    ] = False,
    dtype: shared.Dtype = None,
    generation: Annotated[
        str,
        typer.Option(
            "--generation",
            metavar="engine|native|both",
            help="Rollouts by the engine, by transformers' generate, or one after the other.",
        ),
    ] = "engine",
    iterations: Annotated[
        int, typer.Option("--iterations", help="Timed, after one that sets up.")
    ] = 1,
    as_json: shared.Json = None,
    seed: options.Seed = None,
    debug: options.Debug = False,
    set_values: options.SetValues = None,
) -> None:
    """Seconds of one PPO iteration by phase, beside what the machine could do."""
    from rlhf_app.bench.lengths import parse_lengths
    from rlhf_app.bench.shapes import check_shape

    lengths = parse_lengths(answer_lengths)
    if generation not in _GENERATIONS:
        raise ConfigError(f"--generation {generation}: give one of {', '.join(_GENERATIONS)}")
    default = _ON_GPU if shared.on_gpu() else _ON_CPU
    actor = check_shape(shape or default[0], "--shape")
    critic = check_shape(critic_shape or default[1], "--critic-shape")
    answers = default[2] if rollout_batch is None else rollout_batch
    shared.check_json(as_json)
    if micro_batch is not None and micro_batch_tokens is not None:
        raise ConfigError("--micro-batch and --micro-batch-tokens are both given: give one of them")
    shared.check_counts(
        {"--iterations": iterations, "--max-slots": 1 if max_slots is None else max_slots}
    )
    both = ("ppo.actor", "ppo.critic")
    flags: list[tuple[str, object, str]] = [
        ("--rollout-batch", answers, "ppo.rollout_batch_size"),
        ("--prompt-tokens", prompt_tokens, "ppo.max_prompt_length"),
        ("--answer-tokens", answer_tokens, "ppo.max_response_length"),
        ("--micro-batch", micro_batch, "ppo.micro_batch_size"),
        ("--micro-batch-tokens", micro_batch_tokens, "ppo.micro_batch_tokens"),
        ("--lora-rank", lora_rank, "lora.rank"),
        ("--dtype", dtype, "model.dtype"),
        ("--seed", seed, "seed"),
        # Answers end where the benchmark says.
        ("--answer-lengths", False, "ppo.stop_at_eos"),
    ]
    for model in both:
        flags.append(("--zero-stage", zero_stage, f"{model}.zero_stage"))
        if gradient_checkpointing:
            flags.append(("--gradient-checkpointing", True, f"{model}.gradient_checkpointing"))
        if offload_optimizer:
            flags.append(("--offload-optimizer", "cpu", f"{model}.offload_optimizer"))
    config = shared.resolve(actor, flags, set_values or [])
    if answers % config.ppo.mini_batches:
        raise ConfigError(
            f"--rollout-batch {answers} is no multiple of ppo.mini_batches "
            f"{config.ppo.mini_batches}: change one of them"
        )
    from rlhf_app.bench.ppo import PPOBench

    _run(
        PPOBench(
            actor=actor,
            critic=critic,
            lengths=lengths,
            max_slots=max_slots,
            generations=_GENERATIONS[generation],
            iterations=iterations,
        ),
        config,
        as_json,
    )


def _run(bench: PPOBench, config: RunConfig, as_json: str | None) -> None:
    """Measures and prints; exits with 1 when a loop failed."""
    from rlhf_app.bench.ppo import bench_ppo
    from rlhf_app.bench.shapes import config_of
    from rlhf_app.report.bench_ppo_tables import print_ppo
    from rlhf_app.training.distributed import close, setup

    lengths = config.ppo.max_prompt_length, config.ppo.max_response_length
    for name in (bench.actor, bench.critic):
        shared.check_positions(config_of(name), name, *lengths)
    vocabularies: dict[str, Any] = {
        name: config_of(name).vocab_size for name in (bench.actor, bench.critic)
    }
    if vocabularies[bench.critic] < vocabularies[bench.actor]:
        raise ConfigError(
            f"--critic-shape {bench.critic} knows {vocabularies[bench.critic]} token ids, "
            f"{bench.actor} has {vocabularies[bench.actor]}: give a shape of its family"
        )
    dist = setup()
    try:
        with shared.memory_errors(f"{bench.actor} with {bench.critic}"):
            report = bench_ppo(bench, config, dist, shared.say)
    finally:
        close()
    shared.write(report.as_dict(), as_json, lambda console: print_ppo(console, report))
    shared.end(report.errors)
