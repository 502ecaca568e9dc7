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
        ({"sft__keep_best": "loss"}, "set sft.eval_every to the optimizer steps"),
        ({"reward__keep_best": "accuracy"}, "set reward.eval_every to the optimizer steps"),
        ({"ppo__keep_best": "reward"}, "set ppo.eval_every to the updates between them"),
        ({"ppo__keep_best": "gold"}, "ppo.keep_best gold chooses among evaluations"),
        ({"ppo__keep_best_max_kl": 8.0}, "set ppo.keep_best to reward or gold"),
        # One evaluation alone counts, the one at the end.
        ({"ppo__keep_best": "reward", "ppo__eval_every": 9, "ppo__updates": 9}, "to less than"),
        ({"sft__keep_best": "loss", "sft__eval_every": 9, "sft__max_steps": 4}, "of 4 optimizer"),
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
    load(ppo__keep_best="reward", ppo__eval_every=8, ppo__updates=9)  # after 8, and at the end


def test_the_group_itself_is_not_printed():
    with pytest.raises(ConfigError) as caught:
        load(ppo__keep_best="gold", ppo__actor__learning_rate=1e-3)
    assert str(caught.value) == (
        "ppo.keep_best gold chooses among evaluations and there is one alone: set ppo.eval_every "
        "to the updates between them, or leave ppo.keep_best unset"
    )
