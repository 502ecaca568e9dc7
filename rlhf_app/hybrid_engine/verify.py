"""The minimal path of a hybrid engine, checked at every switch.

    training forward -> generate -> training forward -> optimizer step -> generate ->
    training forward

Run by `rlhf verify` as the worker job `verify`, alone or on several ranks:

    python -m rlhf_app.commands.worker RUN_DIR verify

Each rank has prompts of its own, in number and lengths. A mismatch is noted and the path gone to
its end, so that no rank waits for one that has stopped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_app.config.schema import RunConfig
from rlhf_app.hybrid_engine.decode_step import RECAPTURE_PAYS_TOKENS
from rlhf_app.hybrid_engine.engine import HybridEngine, initialize
from rlhf_app.hybrid_engine.hf_greedy import compare_with_hf
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.memory_use import memory_use, reset_peak
from rlhf_app.hybrid_engine.rollout_check import answer, compare, with_stops
from rlhf_app.hybrid_engine.sampling import SamplingParams
from rlhf_app.hybrid_engine.training_scores import Answered, training_logits
from rlhf_app.hybrid_engine.weight_places import WeightPlaces
from rlhf_app.models.load import load_causal_lm, model_max_length, resolve_dtype
from rlhf_app.models.lora import attach
from rlhf_app.report.verification import Switch, Verification
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training.deepspeed_config import build_config, parameter_groups
from rlhf_app.training.distributed import Dist, close, setup
from rlhf_app.training.files import atomic_write_json
from rlhf_app.training.seeding import seed_everything

# Prompts of a rank, longest last; the first is as short as can be.
_LENGTHS = (1, 5, 12, 9)
# Long enough for CUDA graphs in every mode.
_NEW_TOKENS = RECAPTURE_PAYS_TOKENS + 8
# Fewer than prompts: a slot is refilled.
_SLOTS = 3
_TEMPERATURE = 0.7
# One Adam step of this size moves every trained weight, in bf16 as well.
_LEARNING_RATE = 1e-3
# Steps that fp16's loss scaling may skip before one counts.
_MOST_SKIPPED = 24
# Device memory that libraries keep from their first use on: on Hopper cuBLAS takes 32 MiB for
# every stream it works on, and graphs are captured on one of their own. Beside it small buffers.
_MEMORY_SLACK = 96 << 20


def main(config: RunConfig, run: RunDirectory) -> None:
    """Verify on this rank; rank 0 leaves the findings of all in result.json."""
    dist = setup()
    try:
        seed_everything(config.seed, dist.rank)
        engine = build_engine(config, dist)
        found = Verifier(engine, dist, config.seed).run(_describe(config, engine, dist))
        ranks = dist.gather_objects(found.as_dict())
        if dist.is_main:
            atomic_write_json(run.result("verify"), {"ranks": ranks})
    finally:
        close()


def build_engine(config: RunConfig, dist: Dist) -> HybridEngine:
    """The actor of a run in its engine, adapters included.

    Args:
        config: the run; its actor's settings and the `hybrid_engine` settings count.
        dist: process group and device.

    Raises:
        ConfigError: the model or a setting is unusable.
    """
    assert config.model.actor is not None
    actor = config.ppo.actor
    dtype = resolve_dtype(config.model.dtype, dist.device)
    model = load_causal_lm(
        config.model.actor,
        dtype=dtype,
        device=dist.device,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        gradient_checkpointing=actor.gradient_checkpointing,
        setting="--model",
    )
    if actor.lora.enabled:
        attach(
            model,
            actor.lora,
            seed=config.seed,
            base=config.model.actor,
            setting="ppo.actor.lora",
        )
    ds_config = build_config(actor, dtype=dtype, micro_batch_size=len(_LENGTHS))
    if actor.zero_stage == 3:
        # Else DeepSpeed would leave a small model's weights whole, and nothing was tried.
        ds_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    ds_config["hybrid_engine"] = config.hybrid_engine.model_dump(exclude_none=True)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.0), lr=_LEARNING_RATE)
    engine = initialize(model=model, optimizer=optimizer, config=ds_config)[0]
    engine.generator.lora_rollout = actor.lora.rollout
    return engine


def _describe(config: RunConfig, engine: HybridEngine, dist: Dist) -> str:
    actor = config.ppo.actor
    count = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    parts = [
        f"{config.model.actor} ({engine.module.config.model_type}, {count:,} parameters)",
        f"ZeRO {engine.zero_optimization_stage()}",
        str(engine.module.get_input_embeddings().weight.dtype).removeprefix("torch."),
        f"{dist.world_size} process{'es' * (dist.world_size > 1)} on {dist.device.type}",
    ]
    if actor.lora.enabled:
        parts.append(f"LoRA rank {actor.lora.rank}, {actor.lora.rollout}")
    if config.hybrid_engine.inference_tp_size > 1:
        parts.append(f"tensor parallel {config.hybrid_engine.inference_tp_size}")
    return ", ".join(parts)


class Verifier:
    """Runs the path on one rank of an engine.

    Args:
        engine: nothing of it was used yet.
        dist: process group.
        seed: of the prompts.
    """

    def __init__(self, engine: HybridEngine, dist: Dist, seed: int) -> None:
        self._engine = engine
        self._dist = dist
        self._seed = seed
        positions = model_max_length(engine.module.config)
        self._new_tokens = min(_NEW_TOKENS, positions // 2)
        self._prompts = _prompts(engine.module, seed, dist.rank, positions - self._new_tokens)
        self._places = WeightPlaces(engine.module)

    def run(self, description: str) -> Verification:
        """Go the path.

        Args:
            description: of the model, for the report.

        Returns:
            What was found; `problems` is empty where all is well.
        """
        self._found = found = Verification(description)
        engine = self._engine
        engine.train()
        first_RLV = self._training_forward()
        if self._dist.any(bool(found.problems)):
            return found  # nothing can be compared with what is not finite
        memory_before = found.switches[-1].bytes
        self._generate(1)
        second_RLV = self._training_forward()
        self._check_memory(memory_before)
        # Equal to the last bit, unless this forward is not equal to itself.
        noise = _change(self._logits(), second_RLV)
        moved = _change(first_RLV, second_RLV)
        if not moved <= noise:
            self._problem(f"the training forward changed by {moved:.2g} of its size over generate")
        self._optimizer_step()
        self._generate(2)
        third_RLV = self._training_forward()
        change = _change(third_RLV, second_RLV)
        found.logits_change = change if math.isfinite(change) else None
        if change <= noise:
            self._problem("the optimizer step changed nothing")
        engine.eval()  # ends the iteration that the breakdown describes
        found.breakdown = str(engine.breakdown)
        engine.generator.release()
        if engine.generator.workspace_bytes:
            self._problem("release() did not return the KV workspace")
        return found

    @torch.no_grad()
    def _logits(self) -> torch.Tensor:
        logits_RLV = training_logits(self._engine, self._prompts).float()
        # Some models give entries that are no tokens a logit of -inf.
        return logits_RLV.masked_fill(logits_RLV == -math.inf, 0.0)

    def _training_forward(self) -> torch.Tensor:
        reset_peak(self._dist.device)
        logits_RLV = self._logits()
        norm = float(logits_RLV.norm())
        if not math.isfinite(norm):
            count = int((~logits_RLV.isfinite()).sum())
            self._problem(
                f"the training forward's logits are not finite: {count:,} of "
                f"{logits_RLV.numel():,} are NaN or too large"
            )
        self._note_switch("training forward", norm if math.isfinite(norm) else None)
        return logits_RLV

    def _generate(self, number: int) -> None:
        """Generate, then compare tokens with transformers', log-probs and draws with training's."""
        engine, found, generator = self._engine, self._found, self._engine.generator
        engine.eval()
        self._places.note()
        reset_peak(self._dist.device)
        answered = [
            answer(engine, self._prompts, SamplingParams(self._new_tokens, greedy=True), _SLOTS),
        ]
        params = self._sampling(answered[0])
        answered.append(answer(engine, self._prompts, params))
        form = generator.form
        params = with_stops(params, answered[1], self._dist)
        answered.append(answer(engine, self._prompts, params, _SLOTS))
        sharers = engine.settings.inference_tp_size
        if engine.settings.enabled and sharers > 1 and "tensor parallel" not in form:
            self._problem(
                f"generate {number}: {sharers} processes were to share each rollout, but each "
                "rolled out with whole weights"
            )
        used = generator.workspace_peak_bytes
        self._note_switch("generate", workspace=used)
        found.form = form
        on = engine.settings.enabled
        found.missing = generator.capability.missing if on else "hybrid_engine.enabled"
        found.route = "workspace" if found.missing is None else "native"
        for problem in self._places.problems():
            self._problem(f"generate {number}: {problem}")
        found.weights = str(self._places)
        same = compare_with_hf(
            InferenceModel(engine.module, engine.weights), self._prompts, answered[0].answers
        )
        found.greedy.append(same)
        if not same.ok:
            self._problem(f"generate {number}: not Hugging Face's greedy tokens: {same}")
        engine.train()
        kept = generator.workspace_bytes
        if engine.settings.release_inference_cache and kept:
            self._problem(f"generate {number}: {kept} bytes of KV workspace were not returned")
        found.workspace = f"{used:,} bytes, " + (
            f"{kept:,} kept for the next rollout" if kept else "returned"
        )
        gap, draws = compare(engine, answered, self._dist, floor=True)
        found.gaps.append(gap)
        found.draws.append(draws)
        for problem in [*([] if gap.ok else [str(gap)]), *draws.problems]:
            self._problem(f"generate {number}: {problem}")

    def _sampling(self, greedy: Answered) -> SamplingParams:
        """Another temperature, and likely ids suppressed; the same on all ranks.

        Args:
            greedy: answers that hold ids which would be drawn.
        """
        likely = [answer[0] for answer in greedy.answers]
        ids = {token for part in self._dist.gather_objects(likely) for token in part}
        return SamplingParams(
            self._new_tokens,
            temperature=_TEMPERATURE,
            suppress_ids=tuple(sorted(ids)),
            seed=self._seed,
        )

    def _optimizer_step(self) -> None:
        engine = self._engine
        reset_peak(self._dist.device)
        for _ in range(_MOST_SKIPPED):
            engine.backward(_loss(training_logits(engine, self._prompts), self._prompts))
            engine.step()
            if not getattr(engine.optimizer, "overflow", False):
                break
        else:
            self._problem("fp16's loss scaling found no scale at which a step does not overflow")
        self._note_switch("optimizer step")

    def _check_memory(self, before: int) -> None:
        """On CUDA, where allocations are counted: what a rollout took is back."""
        if self._dist.device.type != "cuda":
            return
        kept = self._engine.generator.workspace_bytes
        left = self._found.switches[-1].bytes - kept - before
        if left > _MEMORY_SLACK + before // 100:
            self._problem(f"generate 1: {left} bytes of device memory did not come back")

    def _note_switch(
        self, name: str, norm: float | None = None, workspace: int | None = None
    ) -> None:
        now, peak = memory_use(self._dist.device)
        if workspace is None:
            workspace = self._engine.generator.workspace_bytes
        self._found.switches.append(Switch(name, norm, now, peak, workspace))

    def _problem(self, text: str) -> None:
        self._found.problems.append(text)


def _prompts(model: Any, seed: int, rank: int, room: int) -> list[list[int]]:
    """Random ids, other ones on every rank and one prompt fewer on every second.

    Args:
        model: whose ids.
        seed: of the run.
        rank: of this process.
        room: most tokens of a prompt.
    """
    vocabulary = model.config.get_text_config().vocab_size
    draw = random.Random(f"{seed} {rank}")
    return [
        [draw.randrange(vocabulary) for _ in range(min(length, room))]
        for length in _LENGTHS[: len(_LENGTHS) - rank % 2]
    ]


def _loss(logits_RLV: torch.Tensor, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Cross-entropy of every prompt's tokens after its first."""
    rows = [
        torch.nn.functional.cross_entropy(
            logits_RLV[row, : len(prompt) - 1].float(),
            torch.tensor(prompt[1:], device=logits_RLV.device, dtype=torch.int64),
            reduction="sum",
        )
        for row, prompt in enumerate(prompts)
    ]
    return torch.stack(rows).sum() / sum(len(prompt) - 1 for prompt in prompts)


def _change(new_RLV: torch.Tensor, old_RLV: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((new_RLV - old_RLV).norm() / old_RLV.norm())
