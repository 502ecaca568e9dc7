"""The moving average of the weights, against its closed form. `test_ema_ranks.py`: two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_app.config.schema import SFTConfig
from rlhf_app.training.accumulate import optimizer_step
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.ema import WeightAverage

KINDS = pytest.mark.parametrize(
    ("zero_stage", "dtype"),
    [(stage, dtype) for stage in (0, 1, 2, 3) for dtype in (torch.float32, torch.bfloat16)],
)
STEP = 1 / 2048


class Falling(nn.Module):
    """Every weight has gradient 1: SGD takes `lr` off it at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))

    def forward(self, factor):
        return (self.w * factor).sum()


def engine_of(dist, zero_stage, dtype, offload="none"):
    settings = SFTConfig(
        learning_rate=STEP, lr_schedule="constant", warmup_ratio=0, zero_stage=zero_stage,
        max_grad_norm=0, offload_optimizer=offload,
    )  # fmt: skip
    return engine_for(
        Falling(), settings, dtype=dtype, micro_batch_size=1, total_steps=300, dist=dist,
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=STEP),
    )  # fmt: skip


def step(engine, average, dist, times=1):
    factor = torch.ones((), dtype=engine.module.w.dtype)
    for _ in range(times):
        optimizer_step(engine, [factor], lambda c: (engine(c), {}), 1.0, dist)
        average.update()


def fallen(steps, decay):
    """Of w = 1 - k s the average is 1 - s (k - decay (1 - decay^k) / (1 - decay))."""
    return STEP * (steps - decay * (1 - decay**steps) / (1 - decay))


@KINDS
def test_complaint_dsc28_the_average_follows_small_steps_in_half_precision(dist, zero_stage, dtype):
    """DeepSpeed-Chat keeps its EMA (decay 0.992) in the weights' dtype, where it never moves.

    DeepSpeedExamples, applications/DeepSpeed-Chat, step 3, `moving_average`: lerp of bf16 or fp16
    tensors. A weight of 1 falls to 0.95 in 100 steps; at decay 0.992 bf16 must see a gap of 0.25
    before its average changes at all.
    """
    decay, steps = 0.992, 100
    engine = engine_of(dist, zero_stage, dtype)
    average = WeightAverage(engine, decay, dist)
    step(engine, average, dist, steps)
    moved = average.distances()
    # All weights are 1 at first, so the relative distance is the fall of one of them.
    assert moved["ema_distance"] == pytest.approx(fallen(steps, decay), rel=1e-3)
    assert moved["sft_distance"] == pytest.approx(steps * STEP, rel=1e-4)
    assert moved["ema_distance"] > 0.01
    theirs = torch.ones((), dtype=torch.bfloat16)
    for k in range(1, steps + 1):
        theirs = torch.lerp(torch.tensor(1 - k * STEP, dtype=torch.bfloat16), theirs, decay)
    assert theirs == 1.0  # what it would have been


@KINDS
def test_weights_are_the_average_and_the_model_stays_itself(dist, zero_stage, dtype):
    engine = engine_of(dist, zero_stage, dtype)
    average = WeightAverage(engine, 0.5, dist)
    step(engine, average, dist, 16)
    expected = torch.full((6,), 1 - fallen(16, 0.5)).to(dtype)
    torch.testing.assert_close(average.weights()["w"], expected, rtol=1e-6, atol=0)
    step(engine, average, dist, 8)  # the masters are in their places again
    assert average.distances()["sft_distance"] == pytest.approx(24 * STEP, rel=1e-5)
    expected = torch.full((6,), 1 - fallen(24, 0.5)).to(dtype)
    torch.testing.assert_close(average.weights()["w"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_masters_on_the_host_are_averaged_there(dist, zero_stage):
    engine = engine_of(dist, zero_stage, torch.bfloat16, offload="cpu")
    average = WeightAverage(engine, 0.5, dist)
    step(engine, average, dist, 16)
    expected = torch.full((6,), 1 - fallen(16, 0.5)).bfloat16()
    torch.testing.assert_close(average.weights()["w"], expected, rtol=1e-6, atol=0)
    assert {t.device.type for t in average.state_dict()["average"]} == {"cpu"}


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_restored_average_goes_on_as_the_first(dist, zero_stage):
    engine = engine_of(dist, zero_stage, torch.bfloat16)
    first = WeightAverage(engine, 0.9, dist)
    step(engine, first, dist, 10)
    saved = {name: [t.clone() for t in value] for name, value in first.state_dict().items()}
    second = WeightAverage(engine, 0.9, dist)  # begins at other weights
    second.load_state_dict(saved)
    step(engine, first, dist, 5)
    second.load_state_dict(saved)
    for average in (first, second):
        assert average.distances()["sft_distance"] == pytest.approx(15 * STEP, rel=1e-4)
    assert first.distances()["ema_distance"] == pytest.approx(fallen(15, 0.9), rel=1e-3)
    assert second.distances()["ema_distance"] == pytest.approx(fallen(10, 0.9), rel=1e-3)
