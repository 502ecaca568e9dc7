"""Lengths of answers: fixed, or drawn."""

import statistics

import pytest

from rlhf_app.bench.lengths import parse_lengths
from rlhf_app.errors import ConfigError


def test_fixed():
    assert parse_lengths("fixed").draw(3, 7, seed=0) == [7, 7, 7]


def test_geometric_has_its_moments():
    """Mean m and variance m (m - 1)."""
    lengths = parse_lengths("geometric:96").draw(40_000, 10**9, seed=1)
    assert min(lengths) == 1
    assert statistics.fmean(lengths) == pytest.approx(96, rel=0.02)
    assert statistics.pvariance(lengths) == pytest.approx(96 * 95, rel=0.05)


def test_geometric_is_cut():
    """Mean of min(X, 256): 96 (1 - (95/96)^256) = 89.4."""
    lengths = parse_lengths("geometric:96").draw(40_000, 256, seed=1)
    assert max(lengths) == 256
    assert statistics.fmean(lengths) == pytest.approx(89.4, rel=0.02)


def test_the_seed_decides():
    lengths = parse_lengths("geometric:5")
    assert lengths.draw(50, 99, seed=3) == lengths.draw(50, 99, seed=3)
    assert lengths.draw(50, 99, seed=3) != lengths.draw(50, 99, seed=4)


def test_mean_one():
    assert parse_lengths("geometric:1").draw(4, 9, seed=0) == [1, 1, 1, 1]


@pytest.mark.parametrize("text", ["", "geometric", "geometric:", "geometric:0.9", "geometric:nan",
                                  "geometric:inf", "fixed:3", "normal:3"])  # fmt: skip
def test_refused(text):
    with pytest.raises(ConfigError, match="--answer-lengths"):
        parse_lengths(text)
