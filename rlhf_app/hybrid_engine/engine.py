"""`initialize` and `HybridEngine`: DeepSpeed's training engine that also generates.

The drop-in for `deepspeed.initialize` with DeepSpeed's own `hybrid_engine` keys:

    engine, optimizer, _, _ = initialize(model=model, config=config)
    engine.eval()
    ids = engine.generate(prompts, max_new_tokens=64)
    engine.train()
    engine.backward(loss(engine, ids))
    engine.step()
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.decode import Rollout
from rlhf_app.hybrid_engine.ds_settings import split_config
from rlhf_app.hybrid_engine.fused.joined import join_storage
from rlhf_app.hybrid_engine.generator import Generator
from rlhf_app.hybrid_engine.sampling import SamplingParams
from rlhf_app.hybrid_engine.tensor_parallel import shared_out
from rlhf_app.hybrid_engine.weights import ResidentWeights, Weights
from rlhf_app.hybrid_engine.zero3 import PinnedWeights, StreamedWeights
from rlhf_app.training.deepspeed_module import load_deepspeed
from rlhf_app.training.distributed import setup

logger = logging.getLogger(__name__)

# Set by launchers: torchrun and DeepSpeed's, then those of MPI.
_LAUNCHED = ("RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    enable_hybrid_engine: bool | None = None,
) -> tuple[HybridEngine, Any, Any, Any]:
    """`deepspeed.initialize`, with an engine that generates from the weights it trains.

    Args:
        args: see `deepspeed.initialize`; its `deepspeed_config` may name the JSON file.
        model: a Hugging Face causal LM.
        optimizer: see `deepspeed.initialize`.
        model_parameters: see `deepspeed.initialize`.
        training_data: see `deepspeed.initialize`.
        lr_scheduler: see `deepspeed.initialize`.
        distributed_port: see `deepspeed.initialize`; unset: DeepSpeed's default.
        mpu: see `deepspeed.initialize`.
        dist_init_required: see `deepspeed.initialize`.
        collate_fn: see `deepspeed.initialize`.
        config: DeepSpeed's config: a dict, a JSON file, or base64 of JSON. Its
            `hybrid_engine` block is read here and kept from DeepSpeed, whose own hybrid
            engine would otherwise start.
        mesh_param: see `deepspeed.initialize`.
        config_params: older name of `config`.
        enable_hybrid_engine: False generates natively; True overrules `enabled: false` in
            the block; unset: the block decides, and without a block the engine is on.

    Returns:
        (engine, optimizer, dataloader, lr_scheduler), as DeepSpeed does.

    Raises:
        ConfigError: no config or two, an unknown or bad `hybrid_engine` key.
    """
    if config is not None and config_params is not None:
        raise ConfigError("both config= and config_params= are given: pass one of them")
    ds_config, settings = split_config(args, config if config is not None else config_params)
    if enable_hybrid_engine is not None:
        settings = settings.model_copy(update={"enabled": enable_hybrid_engine})
    extras: dict[str, Any] = {}
    if distributed_port is not None:
        extras["distributed_port"] = distributed_port
    if dist_init_required is not False and not any(name in os.environ for name in _LAUNCHED):
        setup()  # a group of one; DeepSpeed would look for MPI
    if isinstance(model, torch.nn.Module):
        join_storage(model)  # while nobody holds the parameters' memory
    engine, optimizer, dataloader, lr_scheduler = load_deepspeed().initialize(
        args=None if args is None else _without_config(args),
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=ds_config,
        mesh_param=mesh_param,
        **extras,
    )
    return HybridEngine(engine, settings), optimizer, dataloader, lr_scheduler


def weights_of(engine: Any, settings: HybridEngineSettings) -> Weights:
    """How the module of a DeepSpeed engine gets whole weights for a rollout.

    Args:
        engine: what `deepspeed.initialize` returned.
        settings: `inference_tp_size`; under ZeRO-3 also `pin_parameters` and
            `tp_gather_partition_size`.

    Raises:
        ConfigError: `inference_tp_size` does not divide the number of processes.
    """
    weights: Weights
    if engine.zero_optimization_stage() < 3:
        weights = ResidentWeights(engine)
    elif settings.pin_parameters:
        weights = PinnedWeights(engine)
    else:
        weights = StreamedWeights(engine, settings.tp_gather_partition_size)
    if settings.enabled and settings.inference_tp_size > 1:
        return shared_out(
            engine.module, weights, settings.inference_tp_size, settings.tp_gather_partition_size
        )
    return weights


def _without_config(args: Any) -> Any:
    """A copy of the caller's arguments that names no config: it is passed as a dict."""
    copied = copy.copy(args)
    for name in ("deepspeed_config", "deepscale_config"):
        if getattr(copied, name, None) is not None:
            setattr(copied, name, None)
    return copied


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one iteration: from one switch to `eval()` to the next.

    Attributes:
        total: the whole iteration.
        gather: making ZeRO-3's weights whole for rollouts; 0 where they always are.
        generate: inside `rollout` and `generate`, without `gather`.
        training: between `train()` and the next `eval()`.
        samples: answers made on this rank.
        tokens: answer tokens made on this rank, stop tokens included.
        form: how the tokens of the last rollout were decoded, in words; empty before any.
    """

    total: float = 0.0
    gather: float = 0.0
    generate: float = 0.0
    training: float = 0.0
    samples: int = 0
    tokens: int = 0
    form: str = ""

    @property
    def others(self) -> float:
        """Scoring, host work and whatever else the caller did."""
        return max(0.0, self.total - self.gather - self.generate - self.training)

    @property
    def samples_per_second(self) -> float:
        """Answers of this rank over the whole iteration."""
        return self.samples / self.total if self.total > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens of this rank over the time of rollouts, gathering included."""
        seconds = self.gather + self.generate
        return self.tokens / seconds if seconds > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"E2E latency={self.total:.2f}s | Gather latency={self.gather:.2f}s | "
            f"Generate time={self.generate:.2f}s | Training time={self.training:.2f}s | "
            f"Others={self.others:.2f}s | {self.samples_per_second:.2f} samples/s | "
            f"{self.tokens_per_second:.1f} tokens/s" + (f" | {self.form}" if self.form else "")
        )


class HybridEngine:
    """A DeepSpeed engine whose module also generates; everything else is DeepSpeed's.

    Attributes not defined here are read from and written to the DeepSpeed engine, so
    `backward`, `step`, `save_checkpoint` and the rest work unchanged.

    Args:
        engine: what `deepspeed.initialize` returned.
        settings: the `hybrid_engine` settings.
    """

    _OWN = frozenset(
        {
            "deepspeed_engine", "_generator", "settings", "weights", "breakdown",
            "_current", "_since", "_mode",
        }
    )  # fmt: skip

    def __init__(self, engine: Any, settings: HybridEngineSettings) -> None:
        self.deepspeed_engine = engine
        self.settings = settings
        self.weights = weights_of(engine, settings)
        self._generator: Generator | None = None
        #: The last whole iteration.
        self.breakdown = Breakdown()
        self._current = Breakdown()
        self._since = time.perf_counter()
        self._mode = "start"  # no iteration yet: set-up time belongs to none

    @property
    def generator(self) -> Generator:
        """Generates from the module; made on first use: a critic or reward model never needs it.

        Raises:
            ConfigError: the module is no Hugging Face language model.
        """
        if self._generator is None:
            self._generator = Generator(self.module, self.settings, self.weights)
        return self._generator

    def __getattr__(self, name: str) -> Any:
        if name in HybridEngine._OWN:  # not yet set: never look for it in the other engine
            raise AttributeError(name)
        return getattr(self.deepspeed_engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in HybridEngine._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.deepspeed_engine, name, value)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """The training forward, through DeepSpeed."""
        return self.deepspeed_engine(*inputs, **kwargs)

    def train(self, mode: bool = True) -> HybridEngine:
        """Switch to training: the KV workspace goes back if the settings say so."""
        if not mode:
            return self.eval()
        if self._mode != "train":
            self._close_interval()
            self._mode = "train"
        self.deepspeed_engine.train()
        if self.settings.release_inference_cache and self._generator is not None:
            self._generator.release()
        return self

    def eval(self) -> HybridEngine:
        """Switch to generating and scoring; an iteration starts here."""
        if self._mode != "eval":
            self._close_interval()
            if self._mode == "train":
                self.breakdown = self._current
            self._current = Breakdown()
            self._mode = "eval"
        self.deepspeed_engine.eval()
        return self

    def rollout(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        uids: Sequence[int] | None = None,
        max_slots: int | None = None,
        limits: Sequence[int] | None = None,
    ) -> Rollout:
        """Answer ragged prompts; see `Generator.rollout`.

        The module's mode is the same before and after, whichever it is.
        """
        with self._booked():
            return self.generator.rollout(prompts, params, uids, max_slots, limits)

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hugging Face's `generate`, from the same weights; see `Generator.generate`."""
        with self._booked():
            return self.generator.generate(input_ids, attention_mask, **kwargs)

    @contextmanager
    def _booked(self) -> Iterator[None]:
        """Add the time, answers and tokens of one call to the current iteration."""
        start = time.perf_counter()
        gathered = self.weights.gather_seconds, self.weights.gathered_bytes
        made = self.generator.samples, self.generator.tokens
        try:
            yield
        finally:
            gather = self.weights.gather_seconds - gathered[0]
            tokens = self.generator.tokens - made[1]
            now = self._current
            self._current = replace(
                now,
                gather=now.gather + gather,
                generate=now.generate + time.perf_counter() - start - gather,
                samples=now.samples + self.generator.samples - made[0],
                tokens=now.tokens + tokens,
                form=self.generator.form,
            )
            if self.weights.lockstep and tokens:
                moved = self.weights.gathered_bytes - gathered[1]
                logger.info(
                    "unpinned weights: %.2f MB gathered per token (%d tokens)",
                    moved / tokens / 1e6,
                    tokens,
                )

    def _close_interval(self) -> None:
        """Book the time since the last switch."""
        now = time.perf_counter()
        spent, self._since = now - self._since, now
        training = spent if self._mode == "train" else 0.0
        self._current = replace(
            self._current,
            total=self._current.total + spent,
            training=self._current.training + training,
        )
