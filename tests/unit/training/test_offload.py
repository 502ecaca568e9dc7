"""Where the optimizer lives changes no result: against plain torch AdamW over one process."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from rlhf_app.config.schema import SFTConfig
from rlhf_app.errors import ConfigError
from rlhf_app.training.accumulate import NonFiniteError, optimizer_step
from rlhf_app.training.deepspeed_config import build_config, engine_for

STEPS, LR, CLIP = 4, 1e-2, 0.5


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)


def inputs(dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.randn(5, 8).to(dtype) for _ in range(3)]


def loss_of(module, x):
    return module(x).float().square().sum()


def settings(**changes):
    return SFTConfig(
        **{
            "learning_rate": LR, "max_grad_norm": CLIP, "lr_schedule": "constant",
            "warmup_ratio": 0, "weight_decay": 0.1, "offload_optimizer": "cpu", **changes,
        }
    )  # fmt: skip


def engine_of(dist, dtype=torch.float32, **changes):
    return engine_for(
        model(dtype), settings(**changes), dtype=dtype, micro_batch_size=1, total_steps=10,
        dist=dist,
    )  # fmt: skip


def plain_torch():
    """Losses, norms and weights of the same training in ten lines."""
    module = model()
    decayed = [p for p in module.parameters() if p.ndim > 1]
    free = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    numbers = []
    for _ in range(STEPS):
        loss = sum(loss_of(module, x) for x in inputs()) / 15
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        numbers.append((loss.item(), norm.item()))
    return numbers, [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_offloaded_training_equals_plain_torch(dist, zero_stage):
    from rlhf_app.training.saving import gathered

    engine = engine_of(dist, zero_stage=zero_stage)
    assert engine.zero_optimization_stage() == max(1, zero_stage)
    expected, weights = plain_torch()
    for loss, norm in expected:
        stats = optimizer_step(engine, inputs(), lambda x: (loss_of(engine, x), {}), 15.0, dist)
        assert stats.loss == pytest.approx(loss, rel=1e-5)
        assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
        assert norm != pytest.approx(CLIP)
    parameters = list(engine.module.parameters())
    with gathered(parameters):
        for mine, theirs in zip(parameters, weights, strict=True):
            torch.testing.assert_close(mine.detach(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("accumulate", ["fp32", "bf16"])
def test_bf16_with_the_optimizer_on_the_host_stays_near_fp32(dist, zero_stage, accumulate):
    engine = engine_of(dist, torch.bfloat16, zero_stage=zero_stage, grad_accum_dtype=accumulate)
    for loss, norm in plain_torch()[0]:
        stats = optimizer_step(
            engine, inputs(torch.bfloat16), lambda x: (loss_of(engine, x), {}), 15.0, dist
        )
        assert stats.loss == pytest.approx(loss, rel=0.05)
        assert stats.grad_norm == pytest.approx(norm, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_gradient_that_is_not_finite_changes_nothing(dist, zero_stage, dtype):
    from rlhf_app.training.saving import gathered

    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * math.inf

    engine = engine_of(dist, dtype, zero_stage=zero_stage)
    with pytest.raises(NonFiniteError, match="gradient norm is not finite"):
        optimizer_step(
            engine, inputs(dtype), lambda x: (Infinite.apply(loss_of(engine, x)), {}), 15.0, dist
        )
    parameters = list(engine.module.parameters())
    with gathered(parameters):
        for mine, start in zip(parameters, model(dtype).parameters(), strict=True):
            assert torch.equal(mine, start)


def test_bf16_sums_of_another_dtype_are_refused():
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(ConfigError, match="is trained in torch"):
            build_config(settings(grad_accum_dtype="bf16"), dtype=dtype, micro_batch_size=1)
    config = build_config(
        settings(grad_accum_dtype="bf16"), dtype=torch.bfloat16, micro_batch_size=1
    )
    assert config["data_types"] == {"grad_accum_dtype": "bf16"}


def test_deepspeeds_adam_is_for_cuda(dist):
    with pytest.raises(ValidationError, match="adam_kernel to torch, or offload_optimizer to none"):
        settings(adam_kernel="deepspeed")
    if torch.cuda.is_available():
        return
    with pytest.raises(ConfigError, match="adam_kernel = deepspeed: there is no CUDA device"):
        engine_of(dist, offload_optimizer="none", adam_kernel="deepspeed")
    engine = engine_of(dist, offload_optimizer="none", adam_kernel="auto")
    assert type(engine.optimizer) is torch.optim.AdamW
