"""KL estimates, their gradients, the controller, and settings that cannot work together."""

import math

import pytest
import torch
from pydantic import ValidationError

from rlhf_app.config.schema import PPOConfig
from stages.ppo.kl import KLController, kl_estimate, kl_loss, kl_penalty

P, Q = [0.7, 0.2, 0.1], [0.2, 0.3, 0.5]
KL = sum(p * math.log(p / q) for p, q in zip(P, Q, strict=True))
LN2 = math.log(2)


@pytest.mark.parametrize(
    ("estimator", "at_ln2", "at_minus_ln2"),
    [("k1", LN2, -LN2), ("k2", LN2**2 / 2, LN2**2 / 2), ("k3", 0.5 - 1 + LN2, 2 - 1 - LN2)],
)
def test_by_hand(estimator, at_ln2, at_minus_ln2):
    found = kl_estimate(torch.tensor([LN2, -LN2, 0.0]), estimator)
    assert found.tolist() == pytest.approx([at_ln2, at_minus_ln2, 0.0], abs=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_the_sampling_policy_is_the_kl(estimator):
    p, q = torch.tensor(P), torch.tensor(Q)
    mean = (p * kl_estimate(p.log() - q.log(), estimator)).sum()
    assert mean.item() == pytest.approx(KL, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_mean_gradient_says_which_of_them_make_a_loss(estimator):
    """In the logits, over all three tokens: k1 has none; k2 has that of KL(pi || ref), which is
    p x (log p/q - KL); k3 has that of KL(ref || pi), which is p - q."""
    logits = torch.tensor(P).log().requires_grad_()
    logprobs = logits.log_softmax(0)
    # One row a token, each counted as often as the policy samples it.
    losses = [
        kl_loss(
            logprobs[i].view(1, 1), torch.tensor([[math.log(Q[i])]]), torch.tensor([[True]]),
            estimator, log_ratio_clamp=20.0,
        )
        for i in range(3)
    ]  # fmt: skip
    (found,) = torch.autograd.grad(sum(P[i] * losses[i] for i in range(3)), logits)
    expected = {
        "k1": [0.0] * 3,
        "k2": [p * (math.log(p / q) - KL) for p, q in zip(P, Q, strict=True)],
        "k3": [p - q for p, q in zip(P, Q, strict=True)],
    }
    assert found.tolist() == pytest.approx(expected[estimator], abs=1e-6)


def test_complaint_peers15_outliers_do_not_overflow_and_padding_is_never_read():
    nan = float("nan")
    logprobs = torch.tensor([[-1.0, nan], [-200.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-2.0, 7.0], [-1.0, nan]])
    mask = torch.tensor([[True, False], [True, False]])
    loss = kl_loss(logprobs, reference, mask, "k3", log_ratio_clamp=3.0)
    # d = 1: 1/e; d = -199, clamped to -3: e^3 - 1 - 3.
    assert loss.item() == pytest.approx(math.exp(-1) + math.exp(3) - 4, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[0].tolist() == pytest.approx([1 - math.exp(-1), 0.0])
    assert gradient[1].tolist() == [0.0, 0.0]


def test_a_token_pays_at_most_the_clamp():
    ratios = torch.tensor([0.3, 25.0, -25.0, -800.0])
    assert kl_penalty(ratios, "k1", clamp=10.0).tolist() == pytest.approx([0.3, 10, -10, -10])
    assert kl_penalty(ratios, "k3", clamp=10.0)[1:].tolist() == [10.0, 10.0, 10.0]
    assert torch.equal(kl_penalty(ratios, "k1", clamp=None), ratios)


def test_a_fixed_coefficient_stays():
    controller = KLController.of(PPOConfig(kl_coef=0.3))
    for kl in (0.0, 6.0, 1e6):
        controller.update(kl, 64)
        assert controller.coef == 0.3


def test_an_adaptive_coefficient_by_hand_and_after_a_checkpoint():
    """Target 6, horizon 100, 10 answers an update: at most 0.2 x 10/100 = 2 % a step."""
    settings = PPOConfig(
        kl_coef=0.2, kl_controller="adaptive", kl_target=6.0, kl_horizon=100.0
    )  # fmt: skip
    controller = KLController.of(settings)
    expected = 0.2
    for kl, factor in ((12.0, 1.02), (6.6, 1.01), (6.0, 1.0), (5.4, 0.99), (0.0, 0.98), (-3, 0.98)):
        controller.update(kl, 10)
        expected *= factor
        assert controller.coef == pytest.approx(expected)
        other = KLController.of(settings)
        other.load_state_dict(controller.state_dict())
        controller = other


RLOO = {"advantage_estimator": "rloo", "answers_per_prompt": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"answers_per_prompt": 3}, "rollout_batch_size 64 is not divisible by answers_per_prompt"),
        ({"advantage_estimator": "rloo"}, "set answers_per_prompt to 2 or more"),
        ({"advantage_estimator": "group"}, "set answers_per_prompt to 2 or more"),
        (RLOO | {"gamma": 0.9}, "has no discount: set ppo.gamma to 1"),
        (RLOO | {"whiten_rewards": True}, "no per-token rewards: set whiten_rewards to false"),
        (RLOO | {"critic_warmup_updates": 1}, "no critic to warm up"),
        ({"advantage_estimator": "reinforce_pp", "critic_warmup_updates": 1}, "no critic to warm"),
        ({"kl_penalty": "loss"}, "gradient of mean 0: set kl_estimator to k2 or k3"),
        ({"kl_controller": "adaptive", "kl_coef": 0.0}, "0 stays 0: set kl_coef above 0"),
        # One update could take .2 * 64 / 12.8 = 1 off: all of it.
        ({"kl_controller": "adaptive", "kl_horizon": 12.8}, "update of 64 answers: raise kl_hori"),
        ({"critic_warmup_updates": 3, "updates": 3}, "leaves the actor none of the 3 updates"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        PPOConfig(**settings)


def test_the_shortest_horizon_keeps_the_coefficient_above_0():
    PPOConfig(kl_controller="adaptive", kl_horizon=12.9)


def test_which_estimators_whiten_by_themselves():
    several = {"answers_per_prompt": 2}
    whitens = {
        name: PPOConfig(advantage_estimator=name, **several).whitens_advantages
        for name in ("gae", "rloo", "reinforce_pp", "group")
    }
    assert whitens == {"gae": True, "rloo": False, "reinforce_pp": True, "group": False}
    assert PPOConfig(**RLOO, whiten_advantages=True).whitens_advantages is True
    assert PPOConfig(whiten_advantages=False).whitens_advantages is False
