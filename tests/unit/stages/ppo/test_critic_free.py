"""Advantages without a critic against numbers worked out by hand."""

import math

import pytest
import torch

from stages.ppo.critic_free import (
    group_relative,
    leave_one_out,
    minus_group_mean,
    reward_to_go,
    to_tokens,
)


def test_leave_one_out_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    # 1 - (2 + 6)/2, 2 - (1 + 6)/2, 6 - (1 + 2)/2; 0 - 3/2, 0 - 3/2, 3 - 0.
    expected = [[-3.0, -1.5, 4.5], [-1.5, -1.5, 3.0]]
    assert leave_one_out(rewards).tolist() == expected
    assert leave_one_out(torch.tensor([[5.0, 1.0]])).tolist() == [[4.0, -4.0]]


def test_leave_one_out_is_unbiased():
    """Two answers of one token each, chosen with probability p: over all four outcomes, the mean
    of A x d log pi is the derivative of the expected reward."""
    p, rewards = 0.3, (2.0, -1.0)
    # d log p / d logit is 1 - p for the first token, -p for the second.
    slopes, chances = (1 - p, -p), (p, 1 - p)
    total = 0.0
    for i in (0, 1):
        for j in (0, 1):
            (advantages,) = leave_one_out(torch.tensor([[rewards[i], rewards[j]]])).tolist()
            total += (
                chances[i] * chances[j] * (advantages[0] * slopes[i] + advantages[1] * slopes[j])
            )
    assert total / 2 == pytest.approx(p * (1 - p) * (rewards[0] - rewards[1]))


def test_group_relative_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 6.0]], dtype=torch.float64)
    # Mean 3, deviations -2 -1 3, sample variance (4 + 1 + 9)/2 = 7.
    for eps in (0.0, 0.5):
        expected = [x / (math.sqrt(7) + eps) for x in (-2, -1, 3)]
        assert group_relative(rewards, eps)[0].tolist() == pytest.approx(expected)
    assert group_relative(rewards)[0, 2].item() == pytest.approx(3 / (math.sqrt(7) + 1e-4))


def test_a_group_of_equal_rewards_teaches_nothing():
    equal = torch.full((2, 3), 0.1, dtype=torch.float64)
    assert group_relative(equal).abs().max() < 1e-9
    assert leave_one_out(equal).abs().max() < 1e-9


def test_minus_group_mean():
    assert minus_group_mean(torch.tensor([[1.0, 2.0, 6.0]])).tolist() == [[-2.0, -1.0, 3.0]]


def test_reward_to_go_by_hand_whatever_the_padding_holds():
    nan = float("nan")
    rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, nan, nan], [nan, nan, nan]])
    mask = torch.tensor([[True] * 3, [True, False, False], [False] * 3])
    # 4; 2 + 4/2; 1 + 4/2.
    expected = [[3.0, 4.0, 4.0], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert reward_to_go(rewards, mask, gamma=0.5).tolist() == expected


def test_every_token_of_an_answer_has_its_advantage():
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    out = to_tokens(torch.tensor([1.5, -2.0, 7.0]), mask)
    assert out.tolist() == [[1.5, 1.5], [-2.0, 0.0], [0.0, 0.0]]
