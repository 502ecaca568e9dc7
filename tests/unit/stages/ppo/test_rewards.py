"""Where the score lands, and what a missing EOS costs."""

import math

import pytest
import torch

from stages.ppo.rewards import k1, penalise_missing_eos, token_rewards


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        # EOS in the middle of the padded width, at its end, first token, and an empty answer.
        (2, [-0.1, -0.2 + 7.0, 0.0, 0.0]),
        (4, [-0.1, -0.2, -0.3, -0.4 + 7.0]),
        (1, [-0.1 + 7.0, 0.0, 0.0, 0.0]),
        (0, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_score_is_placed_on_the_last_action(length, expected):
    mask = torch.arange(4).unsqueeze(0) < length
    rewards = token_rewards(
        torch.tensor([7.0]), torch.tensor([[1.0, 2.0, 3.0, 4.0]]), mask, kl_coef=0.1
    )
    assert rewards[0].tolist() == pytest.approx(expected)


def test_rows_of_different_length_get_their_own_score():
    mask = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 3), mask, kl_coef=0.1)
    assert rewards.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]


def test_padding_of_the_kl_is_never_read():
    mask = torch.tensor([[True, False]])
    rewards = token_rewards(
        torch.tensor([1.0]), torch.tensor([[0.5, float("nan")]]), mask, kl_coef=1.0
    )
    assert rewards.tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("subtract", [2.0, -0.5]), ("replace", [2.0, -1.5]), ("ignore", [2.0, 1.0])],
)
def test_missing_eos(mode, expected):
    scores = penalise_missing_eos(
        torch.tensor([2.0, 1.0]), torch.tensor([True, False]), mode=mode, penalty=1.5
    )
    assert scores.tolist() == expected


def test_k1_mean_is_the_kl_of_the_sampling_distribution():
    """Averaged under pi, k1 is sum_i p_i (log p_i - log q_i)."""
    p = torch.tensor([0.7, 0.2, 0.1])
    q = torch.tensor([0.2, 0.3, 0.5])
    expected = sum(a * math.log(a / b) for a, b in [(0.7, 0.2), (0.2, 0.3), (0.1, 0.5)])
    assert float((p * k1(p.log(), q.log())).sum()) == pytest.approx(expected, abs=1e-6)
