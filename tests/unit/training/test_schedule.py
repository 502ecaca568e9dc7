from __future__ import annotations

import pytest

from rlhf_app.training.schedule import lr_factor


def test_linear_with_warmup_by_hand():
    factor = lr_factor("linear", 0.2, 10)
    values = [factor(step) for step in range(11)]
    expected = [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0]
    assert values == pytest.approx(expected)


def test_cosine_by_hand():
    factor = lr_factor("cosine", 0.0, 4)
    half = 2**0.5 / 2
    assert [factor(s) for s in range(5)] == pytest.approx(
        [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0]
    )


def test_constant_stays():
    factor = lr_factor("constant", 0.0, 4)
    assert [factor(step) for step in range(6)] == [1.0] * 6


def test_a_single_step_runs_at_the_full_rate():
    for schedule in ("cosine", "linear", "constant"):
        assert lr_factor(schedule, 0.03, 1)(0) == 1.0
