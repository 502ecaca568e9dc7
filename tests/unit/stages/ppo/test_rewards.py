"""Where the score lands, and what a missing EOS costs."""

import pytest
import torch

from stages.ppo.rewards import penalise_length, penalise_missing_eos, token_rewards


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
def test_complaint_peers8_the_score_is_placed_on_the_last_action(length, expected):
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


def test_complaint_peers25_the_length_penalty_counts_every_token():
    scores = penalise_length(torch.tensor([2.0, 1.0]), torch.tensor([3, 10]), per_token=0.25)
    assert scores.tolist() == [1.25, -1.5]
