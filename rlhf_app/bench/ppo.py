"""The measurement behind `rlhf bench ppo`: whole iterations through the product's own code."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rlhf_app.bench.generate import out_of_memory_line
from rlhf_app.bench.lengths import AnswerLengths
from rlhf_app.bench.limits import Machine, ModelCost
from rlhf_app.bench.machine import device_name, measure_machine, synchronize
from rlhf_app.bench.model_cost import model_cost
from rlhf_app.bench.ppo_limits import PPOWork, adam_bytes, ppo_limits
from rlhf_app.bench.ppo_models import random_examples, random_parts
from rlhf_app.config.schema import RunConfig, TrainableSettings
from rlhf_app.hybrid_engine import Generator, HybridEngine, Rollout, SamplingParams
from rlhf_app.hybrid_engine.memory_use import memory_use
from rlhf_app.hybrid_engine.temporarily import temporarily
from rlhf_app.report.bench_ppo import PHASES, ROLLOUT, Loop, PhaseLimit, PPOReport
from rlhf_app.training.distributed import Dist
from rlhf_app.training.phases import PhaseClock
from stages.ppo.models import PPOModels, assemble
from stages.ppo.rollout import collect
from stages.ppo.update import update_models

_GENERATE = "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOBench:
    """What is run.

    Attributes:
        actor, critic: names of shapes; the reward model has the critic's.
        lengths: of the answers.
        max_slots: most answers decoded at once; None: as the engine chooses.
        generations: "engine", "native" or both, in order.
        iterations: timed, after one that sets up.
    """

    actor: str
    critic: str
    lengths: AnswerLengths
    max_slots: int | None
    generations: tuple[str, ...]
    iterations: int


class _Sampler:
    """The actor as `collect` sees it: rollouts with lengths of the benchmark's choice.

    Args:
        engine: the actor's.
        generator: that makes the rollouts.
        lengths: of the answers; None: all of full length.
        max_slots: most answers decoded at once.
    """

    def __init__(
        self,
        engine: HybridEngine,
        generator: Generator,
        lengths: Sequence[int] | None,
        max_slots: int | None,
    ) -> None:
        self._engine = engine
        self._generator = generator
        self._extras: dict[str, Any] = {} if lengths is None else {"limits": lengths}
        self._max_slots = max_slots
        self.last: Rollout | None = None

    def rollout(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, uids: Sequence[int]
    ) -> Rollout:
        """`Generator.rollout`; what it returned is remembered for its timings."""
        self.last = self._generator.rollout(
            prompts, params, uids, max_slots=self._max_slots, **self._extras
        )
        return self.last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """The training forward."""
        return self._engine(*inputs, **kwargs)


def bench_ppo(
    bench: PPOBench, config: RunConfig, dist: Dist, say: Callable[[str], None]
) -> PPOReport:
    """Builds the models, runs the iterations, and puts their limits beside them.

    Args:
        bench: what is run.
        config: settings of the run; `ppo` holds batches and lengths.
        dist: process group of one.
        say: takes a line of progress.
    """
    ppo = config.ppo
    say(f"building {bench.actor} and {bench.critic}")
    parts = random_parts(bench.actor, bench.critic, config, dist.device)
    dtype = parts.actor.dtype
    say("measuring read bandwidth and peak")
    machine = measure_machine(dist.device, dtype)
    assert parts.reward is not None
    # Before adapters: the limits are those of the models.
    costs = {
        "actor": model_cost(parts.actor),
        "reward": model_cost(parts.reward.backbone),
    }
    names = {"actor": bench.actor}
    if parts.critic is not None:
        costs["critic"] = model_cost(parts.critic.backbone)
        names["critic"] = bench.critic
    steps = ppo.ppo_epochs * ppo.mini_batches
    models = assemble(parts, config, dist, (bench.iterations + 1) * steps)
    lengths = bench.lengths.draw(ppo.rollout_batch_size, ppo.max_response_length, config.seed)
    report = PPOReport(
        models={
            role: {"name": name, **_parameters(getattr(models, role).module)}
            for role, name in names.items()
        },
        device={"name": device_name(dist.device), **asdict(machine)},
        costs={
            role: {**asdict(cost), "kv_bytes_per_token": cost.kv_bytes(1)}
            for role, cost in costs.items()
        },
        work={
            "answers": ppo.rollout_batch_size,
            "prompt_tokens": ppo.max_prompt_length,
            "answer_tokens": ppo.max_response_length,
            "answer_lengths": asdict(bench.lengths),
            "dtype": str(dtype).removeprefix("torch."),
            "optimizer_steps": steps,
            "ppo": ppo.model_dump(mode="json"),
            "hybrid_engine": config.hybrid_engine.model_dump(),
        },
    )
    for generation in bench.generations:
        say(f"{generation} generation: 1 + {bench.iterations} iterations")
        report.loops.append(_loop(generation, bench, models, config, dist, lengths))
        if report.loops[-1].error:
            break  # the engines were left in the middle of an iteration
    slots = max((loop.slots for loop in report.loops), default=0) or len(lengths)
    report.limits = _limits(report, config, lengths, slots, costs, machine)
    return report


def _parameters(module: Any) -> dict[str, int]:
    parameters = list(module.parameters())
    return {
        "parameters": sum(_numel(p) for p in parameters),
        "trained": sum(_numel(p) for p in parameters if p.requires_grad),
    }


def _numel(parameter: torch.Tensor) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _limits(
    report: PPOReport,
    config: RunConfig,
    lengths: list[int],
    slots: int,
    costs: dict[str, ModelCost],
    machine: Machine,
) -> dict[str, PhaseLimit]:
    ppo = config.ppo
    work = PPOWork(
        prompt=ppo.max_prompt_length,
        answers=lengths,
        slots=slots,
        epochs=ppo.ppo_epochs,
        optimizer_steps=report.work["optimizer_steps"],
        actor_lora=ppo.actor.lora.enabled,
        critic_lora=ppo.critic.lora.enabled,
        # Without the penalty nothing that trains depends on it.
        reference=ppo.kl_coef > 0,
        optimizer_bytes=sum(
            report.models[role]["trained"] * _adam_bytes(settings, report.work["dtype"])
            for role, settings in (("actor", ppo.actor), ("critic", ppo.critic))
            if role in report.models
        ),
    )
    return ppo_limits(work, costs["actor"], costs.get("critic"), costs["reward"], machine)


def _adam_bytes(settings: TrainableSettings, dtype: str) -> int:
    if dtype == "float32":
        return adam_bytes(weight_bytes=4, gradient_bytes=4)
    return adam_bytes(2, gradient_bytes=2 if settings.grad_accum_dtype == "bf16" else 4)


def _loop(
    generation: str,
    bench: PPOBench,
    models: PPOModels,
    config: RunConfig,
    dist: Dist,
    lengths: list[int],
) -> Loop:
    """One iteration to set up, then timed ones."""
    loop = Loop(generation)
    engine = models.actor
    engine.generator.release()
    gc.collect()
    if dist.device.type == "cuda":
        torch.cuda.empty_cache()
    generator = engine.generator
    if generation == "native":
        settings = engine.settings.model_copy(update={"enabled": False})
        generator = Generator(engine.module, settings, engine.weights)
    varied = lengths if bench.lengths.mean is not None else None
    sampler = _Sampler(engine, generator, varied, bench.max_slots)
    ppo = config.ppo
    vocabulary = generator.model.get_input_embeddings().num_embeddings
    runs: list[tuple[float, dict[str, float]]] = []
    try:
        for update in range(bench.iterations + 1):
            count = ppo.rollout_batch_size // ppo.answers_per_prompt
            distinct = random_examples(
                vocabulary, count, ppo.max_prompt_length, config.seed + update
            )
            prompts = [prompt for prompt in distinct for _ in range(ppo.answers_per_prompt)]
            peaks: dict[str, int] = {}
            synchronize(dist.device)
            began = time.perf_counter()
            with _peaks(peaks, dist.device):
                batch = collect(
                    replace(models, actor=sampler),  # type: ignore[arg-type]
                    prompts, range(len(prompts)), ppo, dist, seed=config.seed, update=update + 1,
                )  # fmt: skip
                numbers = update_models(
                    models, batch.experience, ppo, dist, seed=config.seed, update=update + 1
                )
            synchronize(dist.device)
            seconds = time.perf_counter() - began
            if update:
                assert sampler.last is not None
                phases = batch.seconds | {
                    name.removesuffix("_seconds"): value
                    for name, value in numbers.items()
                    if name.endswith("_seconds")
                }
                runs.append((seconds, _with_split_rollout(phases, sampler.last)))
                loop.peak_bytes = {
                    name: max(peak, loop.peak_bytes.get(name, 0)) for name, peak in peaks.items()
                }
                loop.first_ratio = numbers["first_ratio"]
    except RuntimeError as error:
        line = out_of_memory_line(error)
        if line is None:
            raise
        loop.error = f"{ppo.rollout_batch_size} answers: {line}"
    if runs and sampler.last is not None:
        loop.seconds = [seconds for seconds, _ in runs]
        loop.phases = next(p for s, p in runs if s == loop.iteration_seconds)
        timings = sampler.last.timings
        loop.tokens = timings.generated_tokens
        loop.form = timings.form
        loop.slots = _slots(sampler.last, bench.max_slots)
    generator.release()
    return loop


def _with_split_rollout(phases: dict[str, float], rollout: Rollout) -> dict[str, float]:
    """The rollout's phase as prefill, decode, and what is around them."""
    whole = phases.pop(_GENERATE)
    timings = rollout.timings
    parts = {"prefill": timings.prefill_seconds, "decode": timings.decode_seconds}
    if timings.form == "native":
        parts = {ROLLOUT: timings.total_seconds}
    parts["around the rollout"] = max(0.0, whole - sum(parts.values()))
    found = parts | phases
    return {name: found.pop(name) for name in PHASES if name in found} | found


def _slots(rollout: Rollout, most: int | None) -> int:
    """Rows decoded at once; native generation does not tell."""
    timings, requests = rollout.timings, len(rollout.tokens)
    if timings.form != "native" and timings.decode_steps:
        return timings.slot_steps // timings.decode_steps
    return min(most or requests, requests)


@contextmanager
def _peaks(into: dict[str, int], device: torch.device) -> Iterator[None]:
    """Notes the peak memory of each phase; the allocator counts without waiting for the device."""
    phase = PhaseClock.phase

    @contextmanager
    def watched(clock: PhaseClock, name: str) -> Iterator[None]:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with phase(clock, name):
            yield
        on_cuda = device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if on_cuda else memory_use(device)[1]
        into[name] = max(peak, into.get(name, 0))

    with temporarily([PhaseClock], "phase", watched):
        yield
