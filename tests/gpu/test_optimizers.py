"""Where and by whose kernel AdamW steps changes no result on CUDA; against plain torch in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_app.config.schema import SFTConfig
from rlhf_app.training.accumulate import optimizer_step
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import setup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LR, STEPS = 1e-2, 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))


def inputs():
    torch.manual_seed(1)
    return [torch.randn(5, 64) for _ in range(3)]


def losses_of_plain_torch():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        loss = sum(module(x).square().sum() for x in inputs()) / 15
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adam_kernel": "auto"},
        {"offload_optimizer": "cpu"},
        {"offload_optimizer": "cpu", "grad_accum_dtype": "bf16"},
    ],
)
def test_training_equals_plain_torch(changes, zero_stage, single_process):
    dist = setup()
    settings = SFTConfig(
        learning_rate=LR, lr_schedule="constant", warmup_ratio=0, zero_stage=zero_stage, **changes
    )
    engine = engine_for(
        model().to(dist.device, torch.bfloat16), settings, dtype=torch.bfloat16,
        micro_batch_size=5, total_steps=STEPS, dist=dist,
    )  # fmt: skip
    batch = [x.to(dist.device, torch.bfloat16) for x in inputs()]
    for expected in losses_of_plain_torch():
        stats = optimizer_step(
            engine, batch, lambda x: (engine(x).float().square().sum(), {}), 15.0, dist
        )
        assert stats.loss == pytest.approx(expected, rel=0.05)
    if "offload_optimizer" in changes:
        optimizer = engine.optimizer.optimizer
        state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        assert state
        assert {t.device.type for t in state} == {"cpu"}
