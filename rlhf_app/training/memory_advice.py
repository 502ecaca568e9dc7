"""Which settings free the most memory in a phase of a stage, and what to set them to.

Settings that change speed alone come first, then those that change the numbers of the run. A
proposal is always one that the configuration check lets through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Literal

from rlhf_app.config.load import with_values
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError

Phase = Literal[
    "model load",
    "rollout",
    "scoring",
    "reference forward",
    "update",
    "optimizer step",
    "evaluation",
    "saving",
]
_SETTINGS = 3
_LORA_RANK = 16
_UNSET_LENGTH = 512  # tokens of a row where data.max_length is unset, at most


@dataclass(frozen=True, slots=True)
class Failure:
    """Where memory ran out.

    Attributes:
        stage: sft, reward or ppo.
        phase: None: outside of all of them.
        model: the one that was at work, where the phase has several: actor, critic or ptx.
        on_host: host memory, not the GPU's.
        world_size: number of ranks.
    """

    stage: str
    phase: Phase | None
    model: str | None = None
    on_host: bool = False
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class Change:
    """A setting, its present value and the one that is proposed."""

    key: str
    present: object
    proposed: object


def advise(config: RunConfig, failure: Failure) -> list[Change]:
    """The settings that help most where memory ran out, the best first.

    Args:
        config: the run's settings.
        failure: where it ran out.

    Returns:
        Three, or fewer where no more are left to change.
    """
    return list(islice(_valid(config, _Proposals(config, failure)), _SETTINGS))


def _valid(config: RunConfig, proposals: _Proposals) -> Iterator[Change]:
    seen = set()
    for change in (*proposals.of_phase(), *proposals.of_any_phase()):
        if change.key in seen or change.present == change.proposed:
            continue
        seen.add(change.key)
        try:
            with_values(config, {change.key: change.proposed})
        except ConfigError:
            continue
        yield change


class _Proposals:
    """What could be changed: a method for each kind of setting."""

    def __init__(self, config: RunConfig, failure: Failure) -> None:
        self._config = config
        self._failure = failure
        self._stage = failure.stage
        groups = [failure.stage]
        if failure.stage == "ppo":
            groups = ["ppo.actor", "ppo.critic"] if config.ppo.has_critic else ["ppo.actor"]
            whose = "critic" if failure.model == "critic" else "actor"
            if failure.model is not None:
                groups = [f"ppo.{whose}"]
        self._groups = groups

    def of_phase(self) -> Iterator[Change]:
        """The best first; some may be what is set already, or not allowed."""
        ppo = self._stage == "ppo"
        match self._failure.phase:
            case "model load":
                yield from self._half_precision()
                yield from self._offload()
                yield from self._zero(3)
                yield from self._adapters()
                yield from self._to("ppo.ema_decay", None, ppo)
            case "rollout":
                at_3 = self._value("ppo.actor.zero_stage") == 3
                yield from self._to("hybrid_engine.pin_parameters", False, at_3)
                yield from self._offload()
                yield from self._half("ppo.max_response_length")
                yield from self._rollout_batch()
                yield from self._half("ppo.max_prompt_length")
            case "scoring":
                yield from self._score_batch()
                yield from self._cache()
                yield from self._micro_batch()
                yield from self._half("ppo.max_response_length")
            case "reference forward":
                yield from self._micro_batch()
                yield from self._cache()
                yield from self._offload()
                yield from self._half("ppo.max_response_length")
            case "update":
                if self._failure.model == "ptx":
                    yield from self._ptx_rows()
                yield from self._micro_batch()
                yield from self._checkpointing()
                yield from self._cache()
                yield from self._offload()
                yield from self._zero(2)
            case "optimizer step":
                yield from self._offload()
                yield from self._zero(2)
                yield from self._bf16_sums()
                yield from self._cache()
                yield from self._adapters()
            case "evaluation":
                if ppo:
                    yield from self._score_batch()
                    yield from self._half("ppo.eval_prompts")
                    yield from self._half("ppo.max_response_length")
                yield from self._micro_batch()
            case "saving":
                yield from self._to("ppo.save_critic", False, ppo and self._config.ppo.has_critic)
                yield from self._to("ppo.ema_decay", None, ppo)
                yield from self._offload()
                yield from self._half_precision()
            case None:
                pass

    def of_any_phase(self) -> Iterator[Change]:
        """For the places that are left."""
        yield from self._half_precision()
        yield from self._micro_batch()
        yield from self._offload()
        yield from self._zero(2)
        yield from self._lengths()
        yield from self._checkpointing()
        yield from self._adapters()

    def _value(self, key: str) -> object:
        return reduce(getattr, key.split("."), self._config)

    def _to(self, key: str, proposed: object, where: bool = True) -> Iterator[Change]:
        if where:
            yield Change(key, self._value(key), proposed)

    def _half(self, key: str) -> Iterator[Change]:
        present = self._value(key)
        if isinstance(present, int) and present > 1:
            yield Change(key, present, present // 2)

    def _micro_batch(self) -> Iterator[Change]:
        tokens = f"{self._stage}.micro_batch_tokens"
        if self._value(tokens) is not None:
            yield from self._half(tokens)
            return
        key = f"{self._stage}.micro_batch_size"
        rows = self._value(key)
        assert isinstance(rows, int)
        # A divisor: the batch must stay a whole number of micro-batches.
        fitting = [size for size in range(1, rows // 2 + 1) if rows % size == 0]
        if fitting:
            yield Change(key, rows, fitting[-1])

    def _rollout_batch(self) -> Iterator[Change]:
        ppo = self._config.ppo
        rows = 1 if ppo.micro_batch_tokens is not None else ppo.micro_batch_size
        unit = rows * ppo.mini_batches * self._failure.world_size
        half = ppo.rollout_batch_size // 2
        if half and half % unit == 0 and half % ppo.answers_per_prompt == 0:
            yield Change("ppo.rollout_batch_size", ppo.rollout_batch_size, half)

    def _score_batch(self) -> Iterator[Change]:
        ppo = self._config.ppo
        if ppo.score_batch_tokens is not None:
            yield from self._half("ppo.score_batch_tokens")
        elif not self._failure.on_host:
            # Unset it is four micro-batches on the GPU: one of them.
            row = ppo.max_prompt_length + ppo.max_response_length
            tokens = ppo.micro_batch_tokens or ppo.micro_batch_size * row
            yield Change("ppo.score_batch_tokens", None, tokens)

    def _ptx_rows(self) -> Iterator[Change]:
        ppo = self._config.ppo
        rows = ppo.ptx_batch_size or ppo.rollout_batch_size // ppo.mini_batches
        if rows > 1:
            yield Change("ppo.ptx_batch_size", ppo.ptx_batch_size, rows // 2)

    def _lengths(self) -> Iterator[Change]:
        if self._stage == "ppo":
            yield from self._half("ppo.max_response_length")
            yield from self._half("ppo.max_prompt_length")
            return
        present = self._config.data.max_length
        yield Change("data.max_length", present, (present or _UNSET_LENGTH) // 2)

    def _cache(self) -> Iterator[Change]:
        yield from self._to(
            "hybrid_engine.release_inference_cache", True, where=self._stage == "ppo"
        )

    def _checkpointing(self) -> Iterator[Change]:
        for group in self._groups:
            yield from self._to(f"{group}.gradient_checkpointing", True)

    def _offload(self) -> Iterator[Change]:
        where = "none" if self._failure.on_host else "cpu"
        for group in self._groups:
            yield from self._to(f"{group}.offload_optimizer", where)

    def _zero(self, least: int) -> Iterator[Change]:
        if self._failure.world_size == 1:
            return  # there is nobody to share with
        for group in self._groups:
            stage = self._value(f"{group}.zero_stage")
            assert isinstance(stage, int)
            yield Change(f"{group}.zero_stage", stage, least if stage < least else 3)

    def _bf16_sums(self) -> Iterator[Change]:
        dtype = self._config.model.dtype
        if dtype == "bf16" or (dtype == "auto" and not self._failure.on_host):
            for group in self._groups:
                yield from self._to(f"{group}.grad_accum_dtype", "bf16")

    def _half_precision(self) -> Iterator[Change]:
        dtype = self._config.model.dtype
        if dtype == "fp32" or (dtype == "auto" and self._config.deployment.type == "cpu"):
            yield Change("model.dtype", dtype, "bf16")

    def _adapters(self) -> Iterator[Change]:
        for group in self._groups:
            yield from self._to(
                f"{group}.lora.rank", _LORA_RANK, where=self._value(f"{group}.lora.rank") == 0
            )
