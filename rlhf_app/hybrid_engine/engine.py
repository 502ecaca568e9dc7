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
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.decode import Rollout
from rlhf_app.hybrid_engine.ds_settings import split_config
from rlhf_app.hybrid_engine.generator import Generator
from rlhf_app.hybrid_engine.sampling import SamplingParams
from rlhf_app.training.deepspeed_module import load_deepspeed


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
    ds_config, settings = split_config(args, config if config is not None else config_params)
    if enable_hybrid_engine is not None:
        settings = settings.model_copy(update={"enabled": enable_hybrid_engine})
    extras: dict[str, Any] = {}
    if distributed_port is not None:
        extras["distributed_port"] = distributed_port
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
        generate: inside `rollout` and `generate`.
        training: between `train()` and the next `eval()`.
    """

    total: float = 0.0
    generate: float = 0.0
    training: float = 0.0

    @property
    def others(self) -> float:
        """Scoring, host work and whatever else the caller did."""
        return max(0.0, self.total - self.generate - self.training)

    def __str__(self) -> str:
        return (
            f"E2E latency={self.total:.2f}s | Gather latency=0.00s | "
            f"Generate time={self.generate:.2f}s | Training time={self.training:.2f}s | "
            f"Others={self.others:.2f}s"
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
        {"deepspeed_engine", "generator", "settings", "breakdown", "_current", "_since", "_mode"}
    )

    def __init__(self, engine: Any, settings: HybridEngineSettings) -> None:
        self.deepspeed_engine = engine
        self.settings = settings
        self.generator = Generator(engine.module, settings)
        #: The last whole iteration.
        self.breakdown = Breakdown()
        self._current = Breakdown()
        self._since = time.perf_counter()
        self._mode = "start"  # no iteration yet: set-up time belongs to none

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
        if self.settings.release_inference_cache:
            self.generator.release()
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
    ) -> Rollout:
        """Answer ragged prompts; see `Generator.rollout`.

        The module's mode is the same before and after, whichever it is.
        """
        self._check_zero()
        start = time.perf_counter()
        try:
            return self.generator.rollout(prompts, params, uids, max_slots)
        finally:
            self._add_generate(time.perf_counter() - start)

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hugging Face's `generate`, from the same weights; see `Generator.generate`."""
        self._check_zero()
        start = time.perf_counter()
        try:
            return self.generator.generate(input_ids, attention_mask, **kwargs)
        finally:
            self._add_generate(time.perf_counter() - start)

    def _check_zero(self) -> None:
        engine = self.deepspeed_engine
        if engine.zero_optimization_stage() >= 3 and engine.world_size > 1:
            raise ConfigError(
                "zero_stage 3 cannot roll out on more than one rank: each rank would wait for "
                "the others' weights at its own pace; set zero_stage to 0, 1 or 2"
            )

    def _add_generate(self, seconds: float) -> None:
        self._current = replace(self._current, generate=self._current.generate + seconds)

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
