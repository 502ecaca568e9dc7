from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_app.config.schema import PolicySettings, SFTConfig
from rlhf_app.training import deepspeed_config
from rlhf_app.training.deepspeed_config import build_config, parameter_groups
from rlhf_app.training.distributed import close, setup
from rlhf_app.training.saving import gather_state_dict


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


def test_large_models_are_cut_into_groups_that_keep_siblings_together(monkeypatch):
    monkeypatch.setattr(deepspeed_config, "_GROUP_PARAMETERS", 100)
    block = nn.Module()
    block.embedding = nn.Embedding(30, 4)  # 120: more than a group, so one of its own
    block.q_proj, block.k_proj, block.v_proj = (nn.Linear(4, 4) for _ in range(3))  # 60 together
    block.up = nn.Linear(4, 9)  # 36 and 9: the weight still fits beside them
    block.norm = nn.LayerNorm(4)
    names = {id(parameter): name for name, parameter in block.named_parameters()}

    groups = parameter_groups(block, 0.0)

    assert [[names[id(p)] for p in group["params"]] for group in groups] == [
        ["embedding.weight"],
        [f"{x}_proj.{kind}" for kind in ("weight", "bias") for x in "qkv"] + ["up.weight"],
        ["up.bias", "norm.weight", "norm.bias"],
    ]
    assert all(group["weight_decay"] == 0.0 for group in groups)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_cut_changes_no_step(monkeypatch, stage):
    def trained(limit):
        monkeypatch.setattr(deepspeed_config, "_GROUP_PARAMETERS", limit)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).bfloat16()
        settings = PolicySettings(learning_rate=1e-2, lr_schedule="constant", zero_stage=stage)
        dist = setup()
        try:
            engine = deepspeed_config.engine_for(
                model, settings, dtype=torch.bfloat16, micro_batch_size=4, total_steps=3, dist=dist
            )
            x = torch.ones(4, 8, dtype=torch.bfloat16)
            for _ in range(3):
                engine.backward(engine(x).float().square().sum())
                norm = engine.step() or engine.get_global_grad_norm()
            whole = gather_state_dict(engine.module, dist)
            groups = len(engine.optimizer.param_groups)
            return groups, float(norm), whole
        finally:
            close()

    one, norm, weights = trained(1 << 30)
    several, norm_cut, weights_cut = trained(144)

    assert (one, several) == (1, 2)
    assert norm_cut == pytest.approx(norm, rel=1e-5)
    assert all(torch.equal(weights_cut[name], value) for name, value in weights.items())
