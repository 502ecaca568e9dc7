from __future__ import annotations

import torch
from torch import nn

from rlhf_app.config.schema import SFTConfig
from rlhf_app.training.deepspeed_config import build_config, parameter_groups


def test_clipping_is_always_written():
    for norm in (0.0, 0.5):
        config = build_config(
            SFTConfig(max_grad_norm=norm), dtype=torch.float32, micro_batch_size=2
        )
        assert config["gradient_clipping"] == norm


def test_half_precision_accumulates_in_fp32():
    settings = SFTConfig(zero_stage=0)
    config = build_config(settings, dtype=torch.bfloat16, micro_batch_size=2)
    assert config["bf16"]["enabled"]
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in build_config(settings, dtype=torch.float32, micro_batch_size=2)


def test_biases_norms_and_frozen_weights_are_not_decayed():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    decayed, free = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert free["weight_decay"] == 0.0
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert [p.shape for p in free["params"]] == [(4,), (4,), (4,), (2,)]


def test_one_group_without_decay():
    (group,) = parameter_groups(nn.Linear(3, 4), 0.0)
    assert len(group["params"]) == 2
