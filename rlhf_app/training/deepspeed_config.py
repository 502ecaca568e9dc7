"""From a model's settings to a DeepSpeed engine: configuration, optimizer, schedule."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import nn

from rlhf_app.config.schema import HybridEngineSettings, TrainableSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.fused.joined import adjoining_sets
from rlhf_app.training.deepspeed_module import compiled_adamw, load_deepspeed
from rlhf_app.training.distributed import Dist
from rlhf_app.training.error_phase import within
from rlhf_app.training.schedule import lr_factor

log = logging.getLogger(__name__)

# 4 GiB in fp32.
_GROUP_PARAMETERS = 1 << 30

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def build_config(
    settings: TrainableSettings, *, dtype: torch.dtype, micro_batch_size: int
) -> dict[str, Any]:
    """Translates settings into DeepSpeed's configuration.

    Args:
        settings: optimisation of one model.
        dtype: of the parameters in training: fp32, bf16 or fp16.
        micro_batch_size: rows of one forward on one rank. DeepSpeed only reports with it.

    Returns:
        The dict that `deepspeed.initialize(config=...)` takes.

    Raises:
        ConfigError: bf16 gradient sums of a model that is not trained in bf16.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if settings.grad_accum_dtype == "bf16" and dtype != torch.bfloat16:
        raise ConfigError(
            f"grad_accum_dtype = bf16: the model is trained in {dtype}; set model.dtype "
            "to bf16, or grad_accum_dtype to fp32"
        )
    offload = settings.offload_optimizer == "cpu"
    # In half precision our stage 0 is DeepSpeed's stage 1: its stage 0 adds the gradients of
    # the micro-batches up in half precision (bf16) or never applies the loss scale (fp16).
    # Both keep whole parameters and gradients on every rank; stage 1 also splits the fp32
    # masters and Adam's moments between ranks, which changes no result.
    # It has no offloading either.
    stage = max(settings.zero_stage, 1) if half or offload else settings.zero_stage
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        # The real number differs between steps; `optimizer_step` sets the boundary itself.
        "gradient_accumulation_steps": 1,
        # Without the key DeepSpeed clips at 1.0.
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        # Leaves the weights alone when the gradient norm is not finite.
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},
        "fp16": {"enabled": dtype == torch.float16},
    }
    if half:
        # Sums over micro-batches in half precision would lose small contributions.
        config["data_types"] = {"grad_accum_dtype": settings.grad_accum_dtype}
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": torch.cuda.is_available(),
        }
        # torch's AdamW has a fused kernel for the CPU; DeepSpeed's would have to be compiled.
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the trainable parameters into decayed matrices and free vectors.

    Biases and norm weights have one dimension and are not decayed. Otherwise groups are as few
    as they can be: fewer groups mean fewer kernels and messages. But ZeRO steps group by group,
    with the fp32 gradients of one group at a time, and pinned host memory comes in powers of
    two: a large model is cut into groups of about a billion parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = [(trained, 0.0)]
    if weight_decay != 0:
        kinds = [
            ([p for p in trained if p.ndim >= 2], weight_decay),
            ([p for p in trained if p.ndim < 2], 0.0),
        ]
    return [
        {"params": group, "weight_decay": decay}
        for parameters, decay in kinds
        # ZeRO keeps their order in memory: query, key and value are one matrix to rollouts.
        for group in _packed(adjoining_sets(model, parameters))
    ]


def _packed(sets: list[list[nn.Parameter]]) -> list[list[nn.Parameter]]:
    """Consecutive sets in groups of at most `_GROUP_PARAMETERS`, or of one larger set."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for together in sets:
        size = sum(_numel(parameter) for parameter in together)
        if not groups or size > room:
            groups.append([])
            room = _GROUP_PARAMETERS
        groups[-1] += together
        room -= size
    return groups


def _numel(parameter: nn.Parameter) -> int:
    """Of the whole parameter, also where only a shard of it is here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def adamw(settings: TrainableSettings) -> OptimizerFactory:
    """AdamW in fused kernels: torch's, for CPU and CUDA, or DeepSpeed's, compiled for CUDA.

    Raises:
        ConfigError: DeepSpeed's is asked for and cannot be had; from the function returned.
    """

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        options: dict[str, Any] = {
            "lr": settings.peak_learning_rate,
            "betas": settings.betas,
            "eps": settings.eps,
        }
        if settings.adam_kernel != "torch" and settings.offload_optimizer == "none":
            compiled = compiled_adamw()
            if not isinstance(compiled, str):
                return compiled(groups, adam_w_mode=True, **options)
            if settings.adam_kernel == "deepspeed":
                raise ConfigError(f"adam_kernel = deepspeed: {compiled}; set it to torch or auto")
            log.info("AdamW by torch: %s", compiled)
        return torch.optim.AdamW(groups, fused=True, **options)

    return make


@within("load")
def engine_for(
    model: nn.Module,
    settings: TrainableSettings,
    *,
    dtype: torch.dtype,
    micro_batch_size: int,
    total_steps: int,
    dist: Dist,
    hybrid: HybridEngineSettings | None = None,
    make_optimizer: OptimizerFactory | None = None,
) -> Any:
    """Wraps a model in a DeepSpeed engine, ready for `optimizer_step`.

    Args:
        model: on any device; it is moved to this rank's.
        settings: optimisation of the model.
        dtype: of the parameters in training.
        micro_batch_size: rows of one forward on one rank.
        total_steps: optimizer steps of the stage, for the schedule.
        dist: this process's place; the process group must be up.
        hybrid: makes the engine able to generate; None: a plain DeepSpeed engine.
        make_optimizer: another optimizer than AdamW, from parameter groups.

    Returns:
        The engine; its `module` is the model.
    """
    deepspeed = load_deepspeed()
    model.to(dist.device)
    groups = parameter_groups(model, settings.weight_decay)
    optimizer = (make_optimizer or adamw(settings))(groups)
    factor = lr_factor(settings.lr_schedule, settings.warmup_ratio, total_steps)
    arguments: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        # Built from the optimizer before DeepSpeed wraps it: both share its groups.
        "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        "config": build_config(settings, dtype=dtype, micro_batch_size=micro_batch_size),
    }
    # DeepSpeed prints memory tables here; its warnings go through its logger and stay.
    with redirect_stdout(io.StringIO()):
        if hybrid is None:
            engine = deepspeed.initialize(**arguments)[0]
        else:
            from rlhf_app.hybrid_engine import initialize

            arguments["config"]["hybrid_engine"] = hybrid.model_dump(exclude_none=True)
            engine = initialize(**arguments)[0]
    return engine
