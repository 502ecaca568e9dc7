from __future__ import annotations

import math

import pytest
import torch

from rlhf_app.training.correlation import correlation


def of(x, y):
    x, y = torch.tensor(x).double(), torch.tensor(y).double()
    sums = (x.sum(), y.sum(), x.square().sum(), y.square().sum(), (x * y).sum())
    return correlation(len(x), *(float(s) for s in sums))


def test_against_torch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, generator=generator)
    y = 0.3 * x + torch.randn(50, generator=generator) + 5
    expected = torch.corrcoef(torch.stack([x, y]).double())[0, 1].item()
    assert 0.1 < abs(expected) < 0.9
    assert of(x.tolist(), y.tolist()) == pytest.approx(expected, abs=1e-10)


def test_by_hand():
    assert of([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert of([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    # Deviations (-1, 0, 1) and (-1, 1, 0): 1 / sqrt(2 * 2).
    assert of([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("x", "y"),
    [([0.1] * 7, [1.0, 2, 3, 4, 5, 6, 7]), ([1.0, 2.0], [3.0, 3.0]), ([1.0], [2.0]), ([], [])],
)
def test_undefined_where_nothing_varies(x, y):
    assert math.isnan(of(x, y))
