"""Which evaluation's weights are kept, by scripted sequences of evaluations."""

from __future__ import annotations

import logging
import math

import pytest

from rlhf_app.training.best import BestWeights, Kept

NAN = math.nan


def saves(best: BestWeights, *evaluations: dict[str, float | None]) -> list[int]:
    """Steps at which the weights are saved."""
    last = len(evaluations)
    return [
        step
        for step, numbers in enumerate(evaluations, start=1)
        if best.offer(step, numbers, last=step == last)
    ]


def rewards(*values: float | None) -> list[dict[str, float | None]]:
    return [{"reward": value} for value in values]


def test_without_a_metric_only_the_last_weights_are_saved():
    best = BestWeights(None)
    assert saves(best, *rewards(3.0, 2.0, 1.0)) == [3]
    assert best.kept is None
    assert best.result() == {}


@pytest.mark.parametrize(
    ("values", "saved"),
    [
        ((1.0, 3.0, 2.0), [1, 2]),
        ((1.0, 2.0, 3.0), [1, 2, 3]),
        ((3.0, 2.0, 1.0), [1]),
        ((2.0, 2.0, 2.0), [1]),  # ties keep the earlier
        ((NAN, 1.0, NAN), [2]),
        ((1.0, math.inf, 0.5), [1]),
        ((None, -1.0, None), [2]),
        ((-5.0,), [1]),
    ],
)
def test_higher_is_better(values, saved):
    best = BestWeights("reward")
    assert saves(best, *rewards(*values)) == saved
    assert best.kept == Kept(saved[-1], "reward", values[saved[-1] - 1])
    assert best.result() == {
        "kept": {"step": saved[-1], "metric": "reward", "value": values[saved[-1] - 1]}
    }


def test_lower_is_better_for_a_loss():
    best = BestWeights("loss")
    assert saves(best, *({"loss": v} for v in (2.0, 1.0, 1.0, 1.5))) == [1, 2]


def test_a_limit_excludes_what_is_above_it():
    best = BestWeights("gold", at_most={"kl_per_answer": 8.0})
    evaluations = [
        {"gold": 0.2, "kl_per_answer": 1.0},
        {"gold": 0.5, "kl_per_answer": 8.0},  # on the limit
        {"gold": 0.9, "kl_per_answer": 8.001},
        {"gold": 0.8, "kl_per_answer": NAN},
        {"gold": 0.7},
    ]
    assert saves(best, *evaluations) == [1, 2]
    assert best.kept == Kept(2, "gold", 0.5)


@pytest.mark.parametrize(
    ("evaluations", "value"),
    [
        ([{"reward": 1.0, "kl_per_answer": 9.0}, {"reward": 0.5, "kl_per_answer": 10.0}], 0.5),
        ([{"reward": NAN, "kl_per_answer": 1.0}, {"reward": NAN, "kl_per_answer": 1.0}], None),
    ],
)
def test_the_last_weights_where_none_qualifies_with_a_warning(evaluations, value, caplog):
    best = BestWeights("reward", at_most={"kl_per_answer": 8.0}, setting="ppo")
    with caplog.at_level(logging.WARNING):
        assert saves(best, *evaluations) == [2]
    assert best.kept == Kept(2, "reward", value)
    assert "ppo: no evaluation had a finite reward and kl_per_answer <= 8" in caplog.text


def test_a_run_continues_from_its_state():
    first = BestWeights("reward")
    first.offer(1, {"reward": 2.0}, last=False)
    second = BestWeights("reward")
    second.load_state_dict(first.state_dict())
    assert second.kept == first.kept
    assert not second.offer(2, {"reward": 1.0}, last=True)
    empty = BestWeights("reward")
    empty.load_state_dict(BestWeights("reward").state_dict())
    assert empty.kept is None
    with pytest.raises(ValueError, match="kept by reward, not by gold"):
        BestWeights("gold").load_state_dict(first.state_dict())
