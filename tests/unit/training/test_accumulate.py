"""One process. `test_scaling.py` compares ranks, ZeRO stages and splits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlhf_app.config.schema import SFTConfig
from rlhf_app.training.accumulate import NonFiniteError, optimizer_step
from rlhf_app.training.deepspeed_config import engine_for

STAGES = pytest.mark.parametrize("zero_stage", [0, 2, 3])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Weighted(nn.Module):
    """Loss c * sum(w): its gradient is c in every element."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), start))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.w * factor).sum()


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def engine_of(model, dist, *, zero_stage, dtype, lr=1.0, clip=0.0):
    settings = SFTConfig(
        learning_rate=lr, lr_schedule="constant", warmup_ratio=0, zero_stage=zero_stage,
        max_grad_norm=clip,
    )  # fmt: skip
    return engine_for(
        model, settings, dtype=dtype, micro_batch_size=1, total_steps=10, dist=dist,
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=lr),
    )  # fmt: skip


def weights(engine):
    from rlhf_app.training.saving import gathered

    with gathered([engine.module.w]):
        return engine.module.w.detach().float().tolist()


def factors(engine, *values):
    return [torch.tensor(v, dtype=engine.module.w.dtype) for v in values]


@STAGES
@DTYPES
def test_small_contributions_of_micro_batches_add_up(dist, zero_stage, dtype):
    # 1 + 64/1024: added one by one in bf16, each 1/1024 would round away.
    engine = engine_of(Weighted(4.0), dist, zero_stage=zero_stage, dtype=dtype)
    batch = factors(engine, 1.0, *[1 / 1024] * 64)
    stats = optimizer_step(engine, batch, lambda c: (engine(c), {"n": c}), 1.0, dist)
    assert weights(engine) == [4.0 - 1.0625] * 4
    assert stats.grad_norm == pytest.approx(2 * 1.0625)
    assert stats.sums == {"n": 1.0625}


@STAGES
def test_updates_below_the_bf16_resolution_are_kept(dist, zero_stage):
    # One step moves 1.0 by 1/2048; bf16 next to 1.0 resolves 1/256 below and 1/128 above.
    engine = engine_of(
        Weighted(1.0), dist, zero_stage=zero_stage, dtype=torch.bfloat16, lr=1 / 2048
    )
    for _ in range(16):
        optimizer_step(engine, factors(engine, 1.0), lambda c: (engine(c), {}), 1.0, dist)
    assert weights(engine) == [1.0 - 16 / 2048] * 4


@STAGES
@DTYPES
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_clipping(dist, zero_stage, dtype, clip):
    engine = engine_of(Weighted(8.0), dist, zero_stage=zero_stage, dtype=dtype, clip=clip)
    stats = optimizer_step(engine, factors(engine, 2.0), lambda c: (engine(c), {}), 1.0, dist)
    # Gradient (2, 2, 2, 2) has norm 4; reported before clipping.
    assert stats.grad_norm == pytest.approx(4.0, rel=1e-3)
    moved = 2.0 if clip == 0 else 2.0 * clip / 4.0
    assert weights(engine) == pytest.approx(
        [8.0 - moved] * 4, rel=1e-5 if dtype == torch.float32 else 4e-3
    )


@STAGES
@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_changes_nothing(dist, zero_stage, dtype, bad):
    engine = engine_of(Weighted(3.0), dist, zero_stage=zero_stage, dtype=dtype)
    batch = factors(engine, 1.0, bad)
    with pytest.raises(NonFiniteError, match=r"loss is not finite .* optimizer step 1"):
        optimizer_step(engine, batch, lambda c: (engine(c), {}), 2.0, dist)
    assert weights(engine) == [3.0] * 4


@STAGES
@DTYPES
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_non_finite_gradient_of_a_finite_loss_changes_nothing(dist, zero_stage, dtype, clip):
    engine = engine_of(Weighted(3.0), dist, zero_stage=zero_stage, dtype=dtype, clip=clip)

    def loss_fn(c):
        return InfiniteGradient.apply(engine(c)), {}

    with pytest.raises(NonFiniteError, match=r"gradient norm is not finite .* optimizer step 1"):
        optimizer_step(engine, factors(engine, 1.0), loss_fn, 1.0, dist)
    assert weights(engine) == [3.0] * 4


def test_learning_rate_follows_the_schedule(dist):
    settings = SFTConfig(learning_rate=0.5, lr_schedule="linear", warmup_ratio=0.25)
    engine = engine_for(
        Weighted(1.0), settings, dtype=torch.float32, micro_batch_size=1, total_steps=4, dist=dist
    )
    step = lambda: optimizer_step(  # noqa: E731
        engine, factors(engine, 1.0), lambda c: (engine(c), {}), 1.0, dist
    )
    assert [step().lr for _ in range(4)] == pytest.approx([0.5, 0.5, 0.5 * 2 / 3, 0.5 / 3])
