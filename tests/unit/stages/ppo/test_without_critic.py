"""Rollout and update with estimators that need no critic, on real engines."""

from dataclasses import replace

import pytest
import torch

from stages.ppo.rollout import collect
from stages.ppo.update import update_models

CHOICES = {
    "rloo": {"advantage_estimator": "rloo", "answers_per_prompt": 4},
    "reinforce_pp": {"advantage_estimator": "reinforce_pp"},
    "reinforce_pp, group mean": {"advantage_estimator": "reinforce_pp", "answers_per_prompt": 4},
    "group": {
        "advantage_estimator": "group", "answers_per_prompt": 4, "kl_penalty": "loss",
        "kl_estimator": "k3", "kl_coef": 0.01,
    },
}  # fmt: skip


def build(cases, ppo, dist, **changes):
    return replace(cases.build(ppo, dist, **changes), critic=None)


def roll(cases, models, ppo, dist, update=1):
    prompts = [cases.PROMPTS[uid // ppo.answers_per_prompt] for uid in range(8)]
    return collect(models, prompts, range(8), ppo, dist, seed=7, update=update)


class EndsWith5:
    """A reward for token 5."""

    def __call__(self, answers, prompts, responses, stopped):
        return torch.tensor([1.0 if r[-1] == 5 else 0.0 for r in responses])


@pytest.mark.parametrize("choice", CHOICES)
def test_it_learns_what_is_rewarded(choice, cases, dist):
    """Answers of one token: chance is 1 in 22."""
    ppo = cases.settings(
        stop_at_eos=False, max_response_length=1, mini_batches=2, ppo_epochs=2, **CHOICES[choice]
    )
    models = replace(build(cases, ppo, dist, init_std=0.05), scorer=EndsWith5())
    rewards = []
    for update in range(1, 21):
        batch = roll(cases, models, ppo, dist, update)
        rewards.append(batch.stats.means(dist)["reward"])
        update_models(models, batch.experience, ppo, dist, seed=7, update=update)
    assert sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.7


@pytest.mark.parametrize("choice", CHOICES)
def test_no_number_is_a_critics_and_the_first_step_is_exact(choice, cases, dist):
    ppo = cases.settings(ppo_epochs=2, mini_batches=2, **CHOICES[choice])
    models = build(cases, ppo, dist)
    batch = roll(cases, models, ppo, dist)
    numbers = update_models(models, batch.experience, ppo, dist, seed=7, update=1)
    numbers |= batch.stats.means(dist) | batch.clock.named()
    assert [name for name in numbers if "value" in name or "critic" in name] == []
    assert "explained_variance" not in numbers
    assert numbers["first_ratio"] == 1.0
    assert numbers["kl_per_answer"] == 0.0
    assert numbers["optimizer_steps"] == models.actor.global_steps == 4
    assert ("kl_loss" in numbers) == (choice == "group")
    assert all(e.old_values_BT is None and e.returns_BT is None for e in batch.experience)


@pytest.mark.parametrize("choice", ["rloo", "reinforce_pp, group mean", "group"])
def test_nothing_depends_on_how_rows_are_cut(choice, cases, dist):
    """With a KL in the loss and a bonus on entropy: the same first step for any micro-batches."""

    def run(**changes):
        ppo = cases.settings(entropy_coef=0.1, dual_clip=3.0, **CHOICES[choice], **changes)
        models = build(cases, ppo, dist)
        seen = []
        for update in (1, 2):
            batch = roll(cases, models, ppo, dist, update)
            numbers = update_models(models, batch.experience, ppo, dist, seed=7, update=update)
            seen += [numbers["loss"], numbers["grad_norm"], numbers.get("kl_loss", 0.0)]
        return seen

    expected = run()
    assert len(set(expected)) > 3
    for changes in ({"micro_batch_size": 8}, {"micro_batch_tokens": 1}):
        assert run(**changes) == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_entropy_bonus_raises_entropy(cases, dist):
    """With no reward to speak of, only the bonus moves the policy."""

    class Nothing:
        def __call__(self, answers, prompts, responses, stopped):
            return torch.zeros(len(responses))

    entropies = {}
    for coefficient in (0.0, 1.0):
        ppo = cases.settings(
            stop_at_eos=False, kl_coef=0.0, entropy_coef=coefficient, **CHOICES["rloo"]
        )
        models = replace(build(cases, ppo, dist), scorer=Nothing())
        entropies[coefficient] = []
        for update in range(1, 7):
            batch = roll(cases, models, ppo, dist, update)
            entropies[coefficient].append(batch.stats.means(dist)["entropy"])
            update_models(models, batch.experience, ppo, dist, seed=7, update=update)
    assert entropies[1.0][-1] > entropies[1.0][0] + 0.2
    assert entropies[1.0][-1] > entropies[0.0][-1] + 0.2


def test_a_loss_on_the_kl_keeps_the_policy_nearer(cases, dist):
    """The same rewards with and without it."""
    kl = {}
    for coefficient in (0.0, 3.0):
        ppo = cases.settings(
            stop_at_eos=False, max_response_length=1, mini_batches=2, ppo_epochs=2,
            **CHOICES["group"] | {"kl_coef": coefficient},
        )  # fmt: skip
        models = replace(build(cases, ppo, dist, init_std=0.05), scorer=EndsWith5())
        for update in range(1, 21):
            batch = roll(cases, models, ppo, dist, update)
            kl[coefficient] = batch.stats.means(dist)["kl_per_answer"]
            update_models(models, batch.experience, ppo, dist, seed=7, update=update)
    assert kl[3.0] < 0.5 * kl[0.0]


def test_the_reported_kl_is_k1_whatever_the_penalty(cases, dist):
    ppo = cases.settings(kl_estimator="k2", **CHOICES["rloo"])
    models = build(cases, ppo, dist)
    batch = roll(cases, models, ppo, dist)
    update_models(models, batch.experience, ppo, dist, seed=7, update=1)
    batch = roll(cases, models, ppo, dist, update=2)
    k1 = k2 = 0.0
    for e in batch.experience:
        for actions, mask, ids, last in zip(
            e.answers.actions_BT, e.answers.action_mask_BT, e.answers.input_ids_BL,
            e.answers.last_index_B.tolist(), strict=True,
        ):  # fmt: skip
            count = int(mask.sum())
            with torch.no_grad():
                policy, reference = (
                    model(input_ids=ids[: last + 1].unsqueeze(0)).logits[0].log_softmax(-1)
                    for model in (models.actor.module, models.reference)
                )
            states = slice(last - count, last)
            ratios = (policy - reference)[states][range(count), actions[:count]]
            k1, k2 = k1 + float(ratios.sum()), k2 + float(ratios.square().sum()) / 2
    assert abs(k1 - k2) > 0.05
    assert batch.stats.means(dist)["kl_per_answer"] == pytest.approx(k1 / 8, abs=1e-4)


def test_the_coefficient_of_the_update_is_the_one_given(cases, dist):
    """Not the settings': an adaptive one has moved on. At 0 the penalty in the reward is gone."""
    ppo = cases.settings(kl_coef=5.0, **CHOICES["rloo"])
    models = build(cases, ppo, dist)
    for update in (1, 2, 3):
        batch = roll(cases, models, ppo, dist, update)
        update_models(models, batch.experience, ppo, dist, seed=7, update=update)
    prompts = [cases.PROMPTS[uid // 4] for uid in range(8)]

    def advantages(**how):
        batch = collect(models, prompts, range(8), ppo, dist, seed=7, update=4, **how)
        return torch.cat([e.advantages_BT[:, 0] for e in batch.experience])

    assert torch.equal(advantages(), advantages(kl_coef=5.0))
    free = cases.settings(kl_coef=0.0, **CHOICES["rloo"])
    batch = collect(models, prompts, range(8), free, dist, seed=7, update=4)
    without = torch.cat([e.advantages_BT[:, 0] for e in batch.experience])
    assert torch.equal(advantages(kl_coef=0.0), without)
    assert not torch.allclose(advantages(), without, atol=1e-2)
