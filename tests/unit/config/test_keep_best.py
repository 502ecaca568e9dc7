"""keep_best needs evaluations to choose from."""

from __future__ import annotations

import pytest

from rlhf_app.config.load import Override, load_config
from rlhf_app.errors import ConfigError


def load(**settings: object):
    pairs = [(key.replace("__", "."), value) for key, value in settings.items()]
    return load_config(overrides=[Override(key, value, "--set") for key, value in pairs]).config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sft__keep_best": "loss"}, "set eval_every to the optimizer steps between them"),
        ({"reward__keep_best": "accuracy"}, "set eval_every to the optimizer steps between them"),
        ({"ppo__keep_best": "reward"}, "set eval_every to the updates between them"),
        ({"ppo__keep_best": "gold"}, "keep_best gold chooses among evaluations"),
        ({"ppo__keep_best_max_kl": 8.0}, "set keep_best to reward or gold"),
        ({"ppo__keep_best": "loss", "ppo__eval_every": 1}, "ppo.keep_best = 'loss'"),
        ({"sft__keep_best": "accuracy", "sft__eval_every": 1}, "sft.keep_best = 'accuracy'"),
        (
            {"ppo__keep_best": "gold", "ppo__eval_every": 1, "ppo__keep_best_max_kl": 0},
            "ppo.keep_best_max_kl = 0",
        ),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        load(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_accepted():
    assert load().ppo.keep_best is load().sft.keep_best is load().reward.keep_best is None
    config = load(
        sft__keep_best="loss", sft__eval_every=5, reward__keep_best="loss", reward__eval_every=5,
        ppo__keep_best="gold", ppo__eval_every=2, ppo__keep_best_max_kl=8.0,
    )  # fmt: skip
    assert (config.sft.keep_best, config.reward.keep_best) == ("loss", "loss")
    assert (config.ppo.keep_best, config.ppo.keep_best_max_kl) == ("gold", 8.0)
