"""PPO losses against hand-worked numbers."""

import math

import pytest
import torch

from rlhf_app.config.schema import PPOConfig
from stages.ppo.experience import Experience, lay_out
from stages.ppo.losses import policy_loss, value_loss
from stages.ppo.objective import actor_objective

LN = math.log


def one(ratio: float, advantage: float) -> tuple[float, float, float]:
    """Loss, its gradient in the log-prob, and the clipped count, for a single token."""
    logprobs = torch.tensor([[-1.0 + LN(ratio)]], requires_grad=True)
    loss, sums = policy_loss(
        logprobs,
        torch.tensor([[-1.0]]),
        torch.tensor([[advantage]]),
        torch.tensor([[True]]),
        clip_range=0.2,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.item(), sums["clipped"].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # d loss / d logprob is -A * ratio where the ratio is free, 0 where it is clipped.
        (1.0, 1.0, -1.0, -1.0, 0),  # first step: loss is -A
        (1.5, 1.0, -1.2, 0.0, 1),  # A > 0, ratio above: clipped, no gradient
        (0.5, 1.0, -0.5, -0.5, 0),  # A > 0, ratio below: free to rise
        (1.5, -1.0, 1.5, 1.5, 0),  # A < 0, ratio above: free to fall
        (0.5, -1.0, 0.8, 0.0, 1),  # A < 0, ratio below: clipped, no gradient
        (1.1, 2.0, -2.2, -2.2, 0),  # inside the range
    ],
)
def test_policy_loss_quadrants(ratio, advantage, loss, gradient, clipped):
    got_loss, got_gradient, got_clipped = one(ratio, advantage)
    assert got_loss == pytest.approx(loss, abs=1e-5)
    assert got_gradient == pytest.approx(gradient, abs=1e-5)
    assert got_clipped == clipped


def test_policy_loss_sums_only_counted_tokens():
    nan = float("nan")
    logprobs = torch.tensor([[-1.0, -2.0, nan], [-3.0, 7.0, 7.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -2.0, 5.0], [-3.0, -900.0, nan]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss, sums = policy_loss(
        logprobs, old, torch.tensor([[1.0, 2.0, nan], [-4.0, 9.0, 9.0]]), mask, clip_range=0.2
    )
    assert loss.item() == pytest.approx(-1.0 - 2.0 + 4.0)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [[-1.0, -2.0, 0.0], [4.0, 0.0, 0.0]]
    assert sums["ratio"].item() == pytest.approx(3.0)
    assert sums["approx_kl"].item() == 0.0


def test_complaint_peers15_policy_loss_clamps_the_log_ratio():
    loss, _ = policy_loss(
        torch.tensor([[500.0]]),
        torch.tensor([[0.0]]),
        torch.tensor([[-1.0]]),
        torch.tensor([[True]]),
        clip_range=0.2,
        log_ratio_clamp=3.0,
    )
    assert loss.item() == pytest.approx(math.exp(3.0), rel=1e-5)


def test_approx_kl_is_k3():
    _, sums = policy_loss(
        torch.tensor([[LN(0.5)]]),
        torch.tensor([[LN(0.25)]]),
        torch.tensor([[0.0]]),
        torch.tensor([[True]]),
        clip_range=0.2,
    )
    assert sums["approx_kl"].item() == pytest.approx(2.0 - 1.0 - LN(2.0), abs=1e-6)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        # gradient of 0.5 (V - R)^2 is V - R; 0 where the clipped value decides.
        (1.0, 1.0, 3.0, 2.0, -2.0, 0),  # unmoved
        (1.1, 1.0, 3.0, 0.5 * 1.9**2, -1.9, 0),  # moved inside the range
        (2.0, 1.0, 3.0, 0.5 * 1.8**2, 0.0, 1),  # ran towards R past the range: held at 1.2
        (0.0, 1.0, 3.0, 0.5 * 3.0**2, -3.0, 0),  # ran away from R: pulled back
        (4.0, 1.0, 0.0, 0.5 * 4.0**2, 4.0, 0),  # ran away upwards
        (0.0, 1.0, 0.0, 0.5 * 0.8**2, 0.0, 1),  # reached R past the range: held at 0.8
    ],
)
def test_value_loss_quadrants(value, old, target, loss, gradient, clipped):
    values = torch.tensor([[value]], requires_grad=True)
    got, sums = value_loss(
        values, torch.tensor([[old]]), torch.tensor([[target]]), torch.tensor([[True]]),
        clip_range=0.2,
    )  # fmt: skip
    (got_gradient,) = torch.autograd.grad(got, values)
    assert got.item() == pytest.approx(loss, rel=1e-5)
    assert got_gradient.item() == pytest.approx(gradient, abs=1e-5)
    assert sums["value_clipped"].item() == clipped


def test_a_value_inside_the_range_is_not_counted_as_clipped_by_rounding():
    """Thousands of values less than the range from their old ones: none is clipped."""
    torch.manual_seed(0)
    old, values = (torch.rand(2, 64, 64) * 0.2 - 0.1).unbind()
    mask = torch.ones(64, 64, dtype=torch.bool)
    _, sums = value_loss(values, old, torch.randn(64, 64), mask, clip_range=0.2)
    assert sums["value_clipped"] == 0


def test_value_loss_ignores_padding():
    values = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    loss, _ = value_loss(
        values, torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 9.0]]),
        torch.tensor([[True, False]]), clip_range=0.2,
    )  # fmt: skip
    assert loss.item() == pytest.approx(0.5)


def test_losses_do_not_depend_on_how_rows_are_cut():
    """Lengths 1 and 3 with advantages +1 and -1: per-token mean is the same for any cut."""
    old = torch.zeros(2, 3)
    advantages = torch.tensor([[1.0, 0, 0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    whole, _ = policy_loss(old, old, advantages, mask, clip_range=0.2)
    parts = sum(
        policy_loss(old[i : i + 1], old[i : i + 1], advantages[i : i + 1], mask[i : i + 1],
                    clip_range=0.2)[0]
        for i in range(2)
    )  # fmt: skip
    # sum of -A over tokens: -1 + 3 = 2, mean 0.5 over the 4 tokens of the batch.
    assert whole.item() / 4 == pytest.approx(0.5)
    assert float(parts) / 4 == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (2.0, -1.0, 2.0, 2.0, 0),  # below the bound: free to fall
        (5.0, -1.0, 3.0, 0.0, 1),  # held at -A * c
        (5.0, -2.0, 6.0, 0.0, 1),
        (0.5, -1.0, 0.8, 0.0, 1),  # the ordinary clip decides
        (5.0, 1.0, -1.2, 0.0, 1),  # A > 0: the dual clip is none of its business
        (0.01, 1.0, -0.01, -0.01, 0),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, gradient, clipped):
    logprobs = torch.tensor([[LN(ratio)]], requires_grad=True)
    got, sums = policy_loss(
        logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.tensor([[True]]),
        clip_range=0.2, dual_clip=3.0,
    )  # fmt: skip
    (slope,) = torch.autograd.grad(got, logprobs)
    assert got.item() == pytest.approx(loss, rel=1e-5)
    assert slope.item() == pytest.approx(gradient, abs=1e-5)
    assert sums["clipped"].item() == clipped


def test_the_objective_is_policy_loss_plus_kl_minus_entropy():
    """By hand, one token each: rho 1, A 2; d = ln 2, so k2 is ln(2)^2/2; entropy .5."""
    logprobs = torch.tensor([[-1.0, 9.0]], requires_grad=True)
    entropy = torch.tensor([[0.5, float("nan")]], requires_grad=True)
    batch = Experience(
        lay_out([[1, 2]], [[3]]), old_logprobs_BT=torch.tensor([[-1.0]]),
        reference_BT=torch.tensor([[-1.0 - LN(2)]]), advantages_BT=torch.tensor([[2.0]]),
    )  # fmt: skip
    ppo = PPOConfig(kl_penalty="loss", kl_estimator="k2", entropy_coef=0.25)
    loss, sums = actor_objective(logprobs[:, :1], entropy[:, :1], batch, ppo, kl_coef=0.3)
    assert loss.item() == pytest.approx(-2.0 + 0.3 * LN(2) ** 2 / 2 - 0.25 * 0.5)
    assert sums["kl_loss"].item() == pytest.approx(LN(2) ** 2 / 2)
    slopes = torch.autograd.grad(loss, [logprobs, entropy])
    # d/dlogp: -A rho + .3 x d; d/dH: -.25.
    assert slopes[0][0].tolist() == pytest.approx([-2.0 + 0.3 * LN(2), 0.0])
    assert slopes[1][0].tolist() == [-0.25, 0.0]
