"""GAE and whitening against hand-worked tables and the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.ppo.advantages import gae, moments, whiten


def by_definition(rewards, values, gamma, lam):
    """A_t = sum_l (gamma lambda)^l delta_{t+l}, O(T^2), one row without padding."""
    n = len(rewards)
    deltas = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)
    ]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


def test_published_vector():
    """Score 5 on the third action, no values: 5 * 0.95^k going back (DeepSpeed-Chat's test)."""
    rewards = torch.tensor([[0.0, 0.0, 0.0, 5.0]])
    advantages, returns = gae(
        rewards, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), gamma=1, gae_lambda=0.95
    )
    assert advantages[0].tolist() == pytest.approx([4.286875, 4.5125, 4.75, 5.0])
    assert torch.equal(returns, advantages)


def test_lambda_zero_is_one_step_td():
    advantages, returns = gae(
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([[10.0, 20.0, 30.0]]),
        torch.ones(1, 3, dtype=torch.bool),
        gamma=0.5,
        gae_lambda=0.0,
    )
    # 1 + .5*20 - 10; 2 + .5*30 - 20; 3 + 0 - 30
    assert advantages[0].tolist() == pytest.approx([1.0, -3.0, -27.0])
    assert returns[0].tolist() == pytest.approx([11.0, 17.0, 3.0])


def test_lambda_one_is_reward_to_go_minus_value():
    advantages, returns = gae(
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([[10.0, 20.0, 30.0]]),
        torch.ones(1, 3, dtype=torch.bool),
        gamma=0.5,
        gae_lambda=1.0,
    )
    assert returns[0].tolist() == pytest.approx([1 + 1 + 0.75, 2 + 1.5, 3.0])
    assert advantages[0].tolist() == pytest.approx([2.75 - 10, 3.5 - 20, 3.0 - 30])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=0, max_size=6), min_size=1, max_size=4),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_ragged_rows_match_the_definition_whatever_the_padding_holds(rows, gamma, lam):
    width = max(1, *(len(r) for r in rows))
    rewards = torch.full((len(rows), width), float("nan"))
    values = torch.full((len(rows), width), float("nan"))
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        rewards[i, : len(row)] = torch.tensor(row)
        values[i, : len(row)] = torch.tensor(row[::-1]) * 0.5
        mask[i, : len(row)] = True
    advantages, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=lam)
    for i, row in enumerate(rows):
        expected = by_definition(row, [0.5 * x for x in row[::-1]], gamma, lam)
        assert advantages[i, : len(row)].tolist() == pytest.approx(expected, abs=1e-4)
        assert advantages[i, len(row) :].tolist() == [0.0] * (width - len(row))
        assert returns[i, len(row) :].tolist() == [0.0] * (width - len(row))


def test_whiten_over_two_ranks_equals_whitening_the_whole():
    values = torch.tensor([[1.0, 2.0, 99.0], [3.0, 6.0, 8.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    # Counted: 1 2 3 6 8, mean 4, population variance (9+4+1+4+16)/5 = 6.8.
    summed = [
        a + b
        for a, b in zip(moments(values[:1], mask[:1]), moments(values[1:], mask[1:]), strict=True)
    ]
    assert summed == [5.0, 20.0, 114.0]
    out = whiten(values, mask, summed)
    std = 6.8**0.5
    assert out[0].tolist() == pytest.approx([-3 / std, -2 / std, 0.0], abs=1e-6)
    assert out[1].tolist() == pytest.approx([-1 / std, 2 / std, 4 / std], abs=1e-6)


def test_whiten_a_single_token_is_zero():
    mask = torch.tensor([[True]])
    assert whiten(torch.tensor([[7.0]]), mask, moments(torch.tensor([[7.0]]), mask)).item() == 0.0
