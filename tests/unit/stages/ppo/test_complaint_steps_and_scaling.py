"""What users of other PPO trainers reported on steps, scaling and units, each as a test."""

from dataclasses import replace

import pytest
import torch

from rlhf_app.config.schema import CriticSettings, PolicySettings, PPOConfig
from stages.ppo.advantages import moments, whiten
from stages.ppo.experience import AnswerTable, Experience
from stages.ppo.kl import KLController
from stages.ppo.rollout import collect
from stages.ppo.update import update_models


@pytest.mark.parametrize(("epochs", "mini_batches"), [(1, 1), (1, 4), (4, 1), (4, 4)])
def test_complaint_trl583_trl648_peers7_epochs_and_mini_batches_are_optimizer_steps(
    epochs, mini_batches, cases, dist
):
    """trl#583, trl#648: gradients thrown away inside accumulation, and in TRL's PPO trainer a
    num_mini_batches that leaves one step an epoch. Both engines count what they stepped."""
    ppo = cases.settings(ppo_epochs=epochs, mini_batches=mini_batches)
    models = cases.build(ppo, dist)
    moved = []
    before = models.actor.module.lm_head.weight.detach().clone()
    step = models.actor.step

    def counted(*args, **kwargs):
        step(*args, **kwargs)
        now = models.actor.module.lm_head.weight.detach().clone()
        moved.append(not torch.equal(now, before if not moved else last[0]))
        last[0] = now

    last = [before]
    models.actor.step = counted
    batch = cases.roll(models, ppo, dist)
    numbers = update_models(models, batch.experience, ppo, dist, seed=7, update=1)
    steps = epochs * mini_batches
    assert numbers["optimizer_steps"] == steps
    assert models.actor.global_steps == models.critic.global_steps == steps
    assert moved == [True] * steps


@pytest.mark.parametrize("cut", [[[0, 1]], [[0], [1]]])
def test_complaint_twinkle292_peers6_micro_batches_do_not_change_the_objective(cut, cases, dist):
    """twinkle#292, AReno#75, SkyRL#1296, ms-swift#10116: answers of 1 and 3 tokens, advantages +1
    and -1. The loss is a mean over tokens, (-1 + 3)/4 = .5; a mean over micro-batches of their
    means, with one answer each, would be 0 and pull in another direction."""
    ppo = cases.settings(rollout_batch_size=2, micro_batch_size=1, advantage_estimator="rloo",
                         answers_per_prompt=2, kl_coef=0.0)  # fmt: skip
    models = replace(cases.build(ppo, dist), critic=None)
    models.actor.train()
    table = AnswerTable([[1, 3], [1, 4]], [[5], [6, 7, 8]])
    experience = []
    for rows in cut:
        answers = table.layout(rows)
        with torch.no_grad():
            logits = models.actor.module(input_ids=answers.input_ids_BL).logits.log_softmax(-1)
        states = logits.gather(
            1, answers.action_index_BT.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
        )
        old = states.gather(2, answers.actions_BT.unsqueeze(-1)).squeeze(-1)
        signs = torch.tensor([[1.0 if row == 0 else -1.0] for row in rows])
        experience.append(
            Experience(answers, old_logprobs_BT=old, reference_BT=old,
                       advantages_BT=signs.expand(old.shape))
        )  # fmt: skip
    expected = _autograd_norm(models.actor.module, table)
    numbers = update_models(models, experience, ppo, dist, seed=7, update=1)
    assert numbers["loss"] == pytest.approx(0.5, abs=1e-5)
    assert numbers["grad_norm"] == pytest.approx(expected, rel=1e-4)


def _autograd_norm(module, table) -> float:
    """Of sum(-A log pi)/4, row by row; at ratio 1 that has the loss's gradient."""
    total = torch.zeros(())
    for row, sign in ((0, 1.0), (1, -1.0)):
        answers = table.layout([row])
        logprobs = module(input_ids=answers.input_ids_BL).logits[0].log_softmax(-1)
        for t in range(answers.num_actions):
            total = total - sign * logprobs[1 + t, answers.actions_BT[0, t]] / 4
    gradients = torch.autograd.grad(total, list(module.parameters()))
    return float(torch.cat([g.flatten() for g in gradients]).norm())


def test_complaint_trl2596_peers7_whitening_is_over_all_ranks(on_ranks):
    """trl#2596: eight GPUs trained differently from one. Whitened on its own, each of these ranks
    would see -1 and 1; together the first has what is below the mean."""
    values = {0: [1.0, 2.0], 1: [5.0, 8.0]}

    def run(dist):
        own = torch.tensor([values[dist.rank]])
        mask = torch.ones(1, 2, dtype=torch.bool)
        return whiten(own, mask, dist.sum(moments(own, mask).tolist()))[0].tolist()

    # Mean 4, population variance (9 + 4 + 1 + 16)/4 = 7.5.
    expected = [[-3 / 7.5**0.5, -2 / 7.5**0.5], [1 / 7.5**0.5, 4 / 7.5**0.5]]
    for found, row in zip(on_ranks(2, run), expected, strict=True):
        assert found == pytest.approx(row)


def test_complaint_dse391_dse533_dsc4_four_epochs_of_four_mini_batches_stay_stable(cases, dist):
    """DSE#391, #533, #266: with ppo_epochs 2, or batches smaller than the rollout, the ratio blew
    up and training diverged. 16 steps a rollout must learn, near the policy that sampled it.

    The reward is the share of odd tokens. Without the clip of the ratio, k3 between the new and
    the sampling policy is .038 to .073 nats a token here, instead of .011 to .025 (8 seeds).
    """
    rate = {"learning_rate": 1e-3, "lr_schedule": "constant"}
    ppo = cases.settings(
        ppo_epochs=4, mini_batches=4, stop_at_eos=False, max_response_length=4, kl_coef=0.02,
        actor=PolicySettings(**rate), critic=CriticSettings(**rate),
    )  # fmt: skip

    class Odd:
        def __call__(self, answers, prompts, responses, stopped):
            return torch.tensor([sum(t % 2 for t in r) / len(r) for r in responses])

    models = replace(cases.build(ppo, dist, init_std=0.05), scorer=Odd())
    rewards, seen = [], []
    for update in range(1, 17):
        batch = cases.roll(models, ppo, dist, update=update)
        rewards.append(batch.stats.means(dist)["reward"])
        numbers = update_models(models, batch.experience, ppo, dist, seed=7, update=update)
        assert numbers["first_ratio"] == 1.0
        seen.append((numbers["approx_kl"], abs(numbers["ratio"] - 1.0)))
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.15
    divergences, ratios = zip(*seen[2:], strict=True)
    assert sum(divergences) / len(divergences) < 0.032
    assert max(ratios) < 0.15
    assert batch.stats.means(dist)["entropy"] > 1.5


def test_complaint_adaptive_kl_counts_nats_per_answer():
    """Fed with a mean per token the controller never reaches its target of 6 nats and lets the
    coefficient fall for ever: 0.2 nats a token is 8 nats for an answer of 40."""
    ppo = PPOConfig(kl_coef=0.1, kl_controller="adaptive")
    per_answer, per_token = KLController.of(ppo), KLController.of(ppo)
    per_answer.update(0.2 * 40, 64)
    per_token.update(0.2, 64)
    # 64 answers of a horizon of 10,000, at most a fifth of that.
    assert per_answer.coef == pytest.approx(0.1 * (1 + 0.2 * 64 / 10_000))
    assert per_token.coef == pytest.approx(0.1 * (1 - 0.2 * 64 / 10_000))


def test_complaint_answers_to_one_prompt_and_of_two_updates_are_not_the_same(cases, dist):
    """OpenRLHF, verl and others: one seed for all gives equal samples on all ranks or in every
    rollout, and then group-relative advantages are all 0."""
    ppo = cases.settings(
        stop_at_eos=False, advantage_estimator="rloo", answers_per_prompt=4
    )  # fmt: skip
    models = replace(cases.build(ppo, dist), critic=None)
    prompts = [cases.PROMPTS[uid // 4] for uid in range(8)]
    seen = set()
    for update in (1, 2):
        batch = collect(models, prompts, range(8), ppo, dist, seed=7, update=update)
        for e in batch.experience:
            seen |= {tuple(row) for row in e.answers.actions_BT.tolist()}
    assert len(seen) == 16
