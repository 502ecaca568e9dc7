"""Settings that another one leaves without effect are named, not ignored in silence."""

import pytest

from rlhf_app.config.ppo import PPOConfig
from rlhf_app.config.unused import ppo_without_effect

RLOO = {"advantage_estimator": "rloo", "answers_per_prompt": 2}
K3 = {"kl_penalty": "loss", "kl_estimator": "k3"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, []),
        ({"gae_lambda": 1.0, "kl_clamp": 5.0}, []),
        (RLOO, []),
        (RLOO | {"gae_lambda": 1.0, "value_clip_range": 0.5}, ["gae_lambda", "value_clip_range"]),
        ({"kl_target": 3.0, "kl_horizon": 1e3}, ["kl_target", "kl_horizon"]),
        ({"kl_target": 3.0, "kl_controller": "adaptive"}, []),
        (K3 | {"kl_clamp": 5.0}, ["kl_clamp"]),
        ({"kl_coef": 0.0, "kl_estimator": "k2"}, ["kl_estimator"]),
        ({"stop_at_eos": False, "missing_eos": "replace"}, ["missing_eos"]),
        ({"missing_eos": "ignore", "missing_eos_penalty": 2.0}, ["missing_eos_penalty"]),
        ({"rewards": ["my.py:score"], "reward_clip": 2.0}, ["reward_clip"]),
        ({"rewards": ["my.py:score", "model"], "reward_clip": 2.0}, []),
    ],
)
def test_ppo_without_effect(settings, named):
    lines = ppo_without_effect(PPOConfig(**settings))
    assert [line.split()[0] for line in lines] == [f"ppo.{name}" for name in named]
    assert all(" has no effect with ppo." in line for line in lines)
