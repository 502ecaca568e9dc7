"""GAE, rewards, whitening and losses: against the definitions, whatever the padding holds.

Legend: B answers, T response tokens.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.ppo.advantages import gae, moments, scale_to_unit_std, whiten
from stages.ppo.critic_free import reward_to_go
from stages.ppo.kl import kl_loss
from stages.ppo.losses import policy_loss, value_loss
from stages.ppo.rewards import token_rewards

FUZZ = settings(max_examples=120, deadline=None, derandomize=True)
NUMBERS = st.floats(-8, 8, width=32)
SHARES = st.floats(0, 1)
JUNK = st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -7.0])


@st.composite
def ragged(draw: st.DrawFn, columns: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A mask whose counted tokens are a prefix of each row, and columns of numbers, NaN beside."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    width = max(1, *lengths) + draw(st.integers(0, 2))
    mask_BT = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    tables = []
    for _ in range(columns):
        table = torch.full((len(lengths), width), math.nan)
        counted = draw(st.lists(NUMBERS, min_size=sum(lengths), max_size=sum(lengths)))
        table[mask_BT] = torch.tensor(counted, dtype=torch.float32)
        tables.append(table)
    return mask_BT, tables


def with_junk(table: torch.Tensor, mask: torch.Tensor, junk: float) -> torch.Tensor:
    return torch.where(mask, table, junk)


@FUZZ
@given(ragged(2), st.floats(0.01, 1), SHARES)
def test_gae_is_its_sum(case, gamma, lam):
    """A_t = sum_k (gamma lambda)^k delta_{t+k}, each term for itself, in double precision."""
    mask_BT, (rewards_BT, values_BT) = case
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma=gamma, gae_lambda=lam)
    for b, length in enumerate(mask_BT.sum(1).tolist()):
        r = rewards_BT[b, :length].double().tolist()
        v = [*values_BT[b, :length].double().tolist(), 0.0]
        for t in range(length):
            expected = sum(
                (gamma * lam) ** (s - t) * (r[s] + gamma * v[s + 1] - v[s])
                for s in range(t, length)
            )
            assert advantages_BT[b, t].item() == pytest.approx(expected, rel=1e-5, abs=1e-4)
            assert returns_BT[b, t].item() == pytest.approx(expected + v[t], rel=1e-5, abs=1e-4)


@FUZZ
@given(ragged(2), JUNK, SHARES)
def test_padding_changes_no_bit_of_rewards_and_advantages(case, junk, lam):
    mask_BT, (rewards_BT, values_BT) = case
    scores_B = torch.arange(len(mask_BT)).float() - 1.5
    rows = []
    for padding in (0.0, junk):
        r_BT, v_BT = (with_junk(x, mask_BT, padding) for x in (rewards_BT, values_BT))
        summed = moments(r_BT, mask_BT).tolist()
        rows.append(
            [
                *gae(r_BT, v_BT, mask_BT, gamma=1.0, gae_lambda=lam),
                token_rewards(scores_B, r_BT, mask_BT, kl_coef=0.1),
                reward_to_go(r_BT, mask_BT, gamma=0.9),
                whiten(r_BT, mask_BT, summed),
                scale_to_unit_std(r_BT, mask_BT, summed),
            ]
        )
    for clean, dirty in zip(*rows, strict=True):
        assert torch.equal(clean, dirty)
        assert not dirty[~mask_BT].any()


@FUZZ
@given(ragged(2), st.integers(0, 6), st.floats(1, 4))
def test_a_reward_reaches_its_own_token_and_those_before_it(case, at, more):
    mask_BT, (rewards_BT, values_BT) = case
    at = min(at, mask_BT.shape[1] - 1)
    changed_BT = rewards_BT.clone()
    changed_BT[0, at] += more
    before, after = (
        gae(r_BT, values_BT, mask_BT, gamma=0.9, gae_lambda=0.5)[0]
        for r_BT in (rewards_BT, changed_BT)
    )
    moved = (after - before).abs() > 1e-6
    reached = bool(mask_BT[0, at])
    assert not moved[1:].any()
    assert not moved[0, at + 1 :].any()
    assert bool(moved[0, at]) == reached
    assert (after - before)[0, at].item() == pytest.approx(more if reached else 0.0, abs=1e-4)


@FUZZ
@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(-1e4, 1e4, width=32)), min_size=1, max_size=40
    ),
    st.integers(1, 4),
    JUNK,
)  # fmt: skip
@example([(True, 5.0)], 1, math.nan)
@example([(True, 0.1)] * 3, 2, math.nan)
@example([(False, 1.0)] * 2, 2, math.inf)
def test_whitening_over_ranks_gives_mean_0_and_variance_1(entries, ranks, junk):
    """Any mask; each rank has some of the numbers and all the moments."""
    mask_N = torch.tensor([counted for counted, _ in entries])
    values_N = with_junk(torch.tensor([value for _, value in entries]), mask_N, junk)
    shares = [slice(rank, None, ranks) for rank in range(ranks)]
    summed = sum(moments(values_N[share], mask_N[share]) for share in shares).tolist()
    white_N = torch.empty(len(entries))
    for share in shares:
        white_N[share] = whiten(values_N[share], mask_N[share], summed)
    assert not white_N[~mask_N].any()
    counted = values_N[mask_N].double().numpy()
    found = white_N[mask_N].double().numpy()
    assert np.isfinite(found).all()
    # Where the spread drowns in the rounding of fp32, only the mean can be asked for.
    if counted.size and counted.std() > 1e-3 * max(1.0, abs(counted).max()):
        assert found.mean() == pytest.approx(0, abs=1e-3)
        assert found.var() == pytest.approx(1, abs=1e-2)
        assert (np.diff(found[np.argsort(counted)]) >= 0).all()
    elif counted.size and counted.std() == 0:
        assert abs(found).max() <= 1e-3 * max(1.0, abs(counted).max())


@FUZZ
@given(ragged(4), JUNK)
@example((torch.tensor([[False]]), [torch.full((1, 1), math.nan)] * 4), math.nan)
def test_padding_changes_no_loss_and_no_gradient(case, junk):
    """Forwards give numbers for padding too; none may reach a weight."""
    mask_BT, tables = case
    results = []
    for padding in (0.0, junk):
        new_BT, *others = (with_junk(table, mask_BT, padding) for table in tables)
        old_BT, targets_BT, reference_BT = others
        results.append([])
        for loss_of in (
            lambda x, o=old_BT, a=targets_BT: policy_loss(
                x, o, a, mask_BT, clip_range=0.2, dual_clip=3.0
            )[0],
            lambda x, o=old_BT, r=targets_BT: value_loss(x, o, r, mask_BT, clip_range=0.2)[0],
            lambda x, r=reference_BT: kl_loss(x, r, mask_BT, "k3", log_ratio_clamp=20.0),
        ):
            leaf_BT = new_BT.clone().requires_grad_()
            loss = loss_of(leaf_BT)
            loss.backward()
            results[-1] += [loss.detach(), leaf_BT.grad]
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
        assert torch.isfinite(dirty).all()
