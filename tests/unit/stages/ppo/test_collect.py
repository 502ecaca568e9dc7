"""Rollout and update with real engines: what must hold before and after the first step."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.config.schema import CriticSettings, HybridEngineSettings, PolicySettings, PPOConfig
from rlhf_app.models.scalar_head import ScalarHead, ScalarHeadModel, ScoreStats
from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.deepspeed_config import engine_for
from stages.ppo.models import PPOModels, fold_normalisation
from stages.ppo.reward import RewardScorer
from stages.ppo.rollout import collect
from stages.ppo.update import update_models

EOS = 2
STATS = ScoreStats(mean=0.3, std=1.7)


@dataclass
class IdFormat:
    """Stands in for a chat format where no text is needed."""

    stop_ids: tuple[int, ...] = (EOS,)


def build(ppo: PPOConfig, dist, init_std: float = 0.3) -> PPOModels:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=init_std, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    actor = LlamaForCausalLM(config)
    reward = ScalarHeadModel(LlamaModel(config), ScalarHead(32))
    critic = copy.deepcopy(reward)
    fold_normalisation(critic, STATS)
    steps = {"micro_batch_size": ppo.micro_batch_size, "total_steps": 8, "dtype": torch.float32}
    return PPOModels(
        reference=copy.deepcopy(actor).eval().requires_grad_(False),
        actor=engine_for(actor, ppo.actor, hybrid=HybridEngineSettings(), dist=dist, **steps),
        critic=engine_for(critic, ppo.critic, dist=dist, **steps),
        scorer=RewardScorer(reward.eval().requires_grad_(False), STATS, ppo, IdFormat()),
        tokenizer=None,
        chat_format=IdFormat(),
        tokenizer_id="",
        suppress_ids=() if ppo.stop_at_eos else (EOS,),
    )


def settings(**changes) -> PPOConfig:
    values = {
        "actor": PolicySettings(learning_rate=3e-3, lr_schedule="constant"),
        "critic": CriticSettings(learning_rate=3e-3, lr_schedule="constant"),
        "rollout_batch_size": 8,
        "micro_batch_size": 2,
        "max_prompt_length": 8,
        "max_response_length": 10,
        "kl_coef": 0.1,
    }
    return PPOConfig(**(values | changes))


PROMPTS = [
    PromptExample(str(i), [1, *range(3, 4 + i % 5)], "", Record((Message("user", ""),)))
    for i in range(8)
]


def roll(models, ppo, dist, update=1):
    return collect(models, PROMPTS, list(range(8)), ppo, dist, seed=7, update=update)


def test_before_the_first_step_kl_is_zero_and_ratio_is_one(dist):
    ppo = settings(ppo_epochs=2, mini_batches=2)
    models = build(ppo, dist)
    batch = roll(models, ppo, dist)
    means = batch.stats.means(dist)
    assert means["kl_per_answer"] == 0.0
    assert means["logprob_gap_max"] < 1e-4
    numbers = update_models(models, batch.experience, ppo, dist, seed=7, update=1)
    assert numbers["first_ratio"] == 1.0
    assert numbers["optimizer_steps"] == 4
    assert numbers["approx_kl"] > 0  # later steps did move the policy
    after = roll(models, ppo, dist, update=2).stats.means(dist)
    assert after["kl_per_answer"] != 0.0
    assert after["logprob_gap_max"] < 1e-4  # the sampler sees the updated weights


def test_critic_starts_as_the_normalised_reward_model(dist):
    ppo = settings()
    models = build(ppo, dist)
    ids = torch.tensor([[1, 3, 4, 5]])
    with torch.no_grad():
        raw = models.scorer.model(ids)
        assert torch.allclose(models.critic(ids), (raw - 0.3) / 1.7, atol=1e-6)


def test_advantages_are_whitened_over_all_action_tokens(dist):
    ppo = settings()
    experience = roll(build(ppo, dist), ppo, dist).experience
    values = torch.cat([e.advantages_BT[e.answers.action_mask_BT] for e in experience])
    assert values.mean().abs() < 1e-5
    assert values.std(unbiased=False).sub(1).abs() < 1e-4


def test_rewards_by_hand(dist):
    """Before the first step KL is 0, so with lambda 1 the return is the score at every token."""
    ppo = settings(gae_lambda=1.0, missing_eos_penalty=0.75, reward_clip=100.0)
    models = build(ppo, dist)
    batch = roll(models, ppo, dist)
    for e in batch.experience:
        for row in range(len(e.answers)):
            mask = e.answers.action_mask_BT[row]
            ids = e.answers.input_ids_BL[row, : e.answers.last_index_B[row] + 1]
            with torch.no_grad():
                score = (models.scorer.model(ids.unsqueeze(0))[0, -1] - 0.3) / 1.7
            ended = int(ids[-1]) == EOS
            expected = float(score) - (0.0 if ended else 0.75)
            assert e.returns_BT[row][mask].tolist() == pytest.approx(
                [expected] * int(mask.sum()), abs=1e-4
            )


def test_the_kl_penalty_by_hand(dist):
    """After an update, with lambda 1: score - kl_coef * sum of the log-ratios from t on."""
    ppo = settings(gae_lambda=1.0, missing_eos="ignore", reward_clip=100.0, kl_coef=0.7)
    models = build(ppo, dist)
    update_models(models, roll(models, ppo, dist).experience, ppo, dist, seed=7, update=1)
    sizes = []
    for e in roll(models, ppo, dist, update=2).experience:
        for row, place in enumerate(e.answers.rows_B.tolist()):
            ids = e.answers.input_ids_BL[row, : e.answers.last_index_B[row] + 1].unsqueeze(0)
            first = len(PROMPTS[place].input_ids)
            with torch.no_grad():
                score = (models.scorer.model(ids)[0, -1] - 0.3) / 1.7
                policy, reference = (
                    model(input_ids=ids).logits[0, :-1].log_softmax(-1)
                    for model in (models.actor.module, models.reference)
                )
            ratios = (policy - reference).gather(1, ids[0, 1:, None])[first - 1 :, 0]
            to_go = ratios.flip(0).cumsum(0).flip(0)
            mask = e.answers.action_mask_BT[row]
            torch.testing.assert_close(
                e.returns_BT[row][mask], score - 0.7 * to_go, atol=1e-4, rtol=1e-4
            )
            sizes.append(float(to_go.abs().max()))
    assert max(sizes) > 0.05, "the policy must have moved for this to say anything"


BUDGETS = [
    {"micro_batch_size": 8},
    {"micro_batch_tokens": 1},  # every row alone
    {"micro_batch_tokens": 25},
    {"micro_batch_tokens": 40, "score_batch_tokens": 200},
    {"score_batch_tokens": 17},
]


@pytest.mark.parametrize("budget", BUDGETS)
def test_complaint_peers6_nothing_depends_on_how_rows_are_cut(budget, dist):
    """Experience and the weights after four steps, against micro-batches of two rows."""

    def run(**changes):
        ppo = settings(mini_batches=2, ppo_epochs=2, **changes)
        models = build(ppo, dist)
        batch = roll(models, ppo, dist)
        numbers = update_models(models, batch.experience, ppo, dist, seed=7, update=1)
        assert numbers["first_ratio"] == 1.0
        assert batch.stats.means(dist)["kl_per_answer"] == 0.0
        rows = {
            int(row): (e.returns_BT[i][mask].tolist(), e.advantages_BT[i][mask].tolist())
            for e in batch.experience
            for i, (row, mask) in enumerate(
                zip(e.answers.rows_B, e.answers.action_mask_BT, strict=True)
            )
        }
        weights = [*models.actor.module.parameters(), *models.critic.module.parameters()]
        return rows, torch.cat([p.detach().flatten() for p in weights]), numbers

    rows, weights, numbers = run()
    other_rows, other_weights, other_numbers = run(**budget)
    assert rows.keys() == other_rows.keys() == set(range(8))
    for row, columns in rows.items():
        for mine, theirs in zip(columns, other_rows[row], strict=True):
            assert theirs == pytest.approx(mine, abs=1e-4)
    for name in ("loss", "value_loss", "grad_norm", "critic_grad_norm", "approx_kl"):
        assert other_numbers[name] == pytest.approx(numbers[name], rel=1e-3, abs=1e-6), name
    # Adam turns rounding noise of gradients near 0 into steps: most weights agree, not all.
    assert (weights - other_weights).abs().mean() < 2e-5


def test_micro_batches_hold_one_mini_batch_each_and_little_padding(dist):
    ppo = settings(mini_batches=2, micro_batch_tokens=40)
    batch = roll(build(ppo, dist), ppo, dist)
    cut = [e.answers.rows_B.tolist() for e in batch.experience]
    half = len(cut) // 2
    assert sorted(row for rows in cut[:half] for row in rows) == [0, 1, 2, 3]
    assert sorted(row for rows in cut[half:] for row in rows) == [4, 5, 6, 7]
    real = sum(int(e.answers.last_index_B.sum()) + len(e.answers) for e in batch.experience)
    whole = sum(e.answers.input_ids_BL.numel() for e in batch.experience)
    assert max(e.answers.input_ids_BL.numel() for e in batch.experience) <= 40
    assert batch.stats.means(dist)["padding_share"] == pytest.approx(1 - real / whole)


def test_seconds_by_phase(dist):
    ppo = settings()
    models = build(ppo, dist)
    batch = roll(models, ppo, dist)
    phases = ["generate", "old", "reference", "values", "reward", "advantages"]
    assert list(batch.seconds) == phases
    assert all(seconds > 0 for seconds in batch.seconds.values())
    numbers = update_models(models, batch.experience, ppo, dist, seed=7, update=1)
    for phase in ("actor_forward_backward", "critic_forward_backward", "step"):
        assert numbers[f"{phase}_seconds"] > 0


def test_fixed_length_answers_have_full_length_and_no_eos(dist):
    ppo = settings(stop_at_eos=False)
    models = build(ppo, dist)
    batch = roll(models, ppo, dist)
    for e in batch.experience:
        assert e.answers.action_mask_BT.all()
        assert not (e.answers.actions_BT == EOS).any()
    assert batch.stats.means(dist)["logprob_gap_max"] < 1e-4


def test_temperature_is_that_of_the_rollout_in_every_log_prob(dist):
    ppo = settings(temperature=0.6)
    batch = roll(build(ppo, dist), ppo, dist)
    assert batch.stats.means(dist)["logprob_gap_max"] < 1e-4


def test_critic_warm_up_leaves_the_actor_alone(dist):
    ppo = settings(critic_warmup_updates=1)
    models = build(ppo, dist)
    before = [p.detach().clone() for p in models.actor.module.parameters()]
    critic_before = models.critic.module.head.weight.detach().clone()
    numbers = update_models(models, roll(models, ppo, dist).experience, ppo, dist, seed=7, update=1)
    assert numbers["optimizer_steps"] == 0
    assert all(
        torch.equal(a, b) for a, b in zip(before, models.actor.module.parameters(), strict=True)
    )
    assert not torch.equal(critic_before, models.critic.module.head.weight)


def test_complaint_peers15_target_kl_stops_the_epochs(dist):
    ppo = settings(ppo_epochs=4, mini_batches=2, target_kl=1e-9)
    models = build(ppo, dist)
    numbers = update_models(models, roll(models, ppo, dist).experience, ppo, dist, seed=7, update=1)
    # The first step sees KL 0; the second sees what the first did.
    assert numbers["optimizer_steps"] == numbers["target_kl_step"] == 2


def test_without_a_stop_no_step_is_named(dist):
    ppo = settings(ppo_epochs=2, target_kl=1e9)
    models = build(ppo, dist)
    numbers = update_models(models, roll(models, ppo, dist).experience, ppo, dist, seed=7, update=1)
    assert "target_kl_step" not in numbers


def test_correlation_of_reward_and_length_is_that_of_the_rollout(dist):
    ppo = settings(missing_eos="ignore", reward_clip=100.0)
    models = build(ppo, dist)
    batch = roll(models, ppo, dist)
    rewards, lengths = [], []
    for e in batch.experience:
        for row in range(len(e.answers)):
            ids = e.answers.input_ids_BL[row, : e.answers.last_index_B[row] + 1]
            with torch.no_grad():
                rewards.append((models.scorer.model(ids.unsqueeze(0))[0, -1].item() - 0.3) / 1.7)
            lengths.append(float(e.answers.action_mask_BT[row].sum()))
    expected = torch.corrcoef(torch.tensor([rewards, lengths]).double())[0, 1].item()
    assert abs(expected) > 0.05
    means = batch.stats.means(dist)
    assert means["reward_length_correlation"] == pytest.approx(expected, abs=1e-5)


def test_non_finite_scores_stop_before_the_update(dist):
    ppo = settings()
    models = build(ppo, dist)
    broken = replace(models.scorer, stats=ScoreStats(mean=float("nan")))
    with pytest.raises(NonFiniteError, match="non-finite score"):
        roll(replace(models, scorer=broken), ppo, dist)


def test_ppo_raises_the_chance_of_a_rewarded_token(dist):
    """A reward for ending with token 5 at fixed length 1 must make token 5 likely."""
    ppo = settings(stop_at_eos=False, max_response_length=1, mini_batches=2, ppo_epochs=2)

    class Rewarded:
        def __call__(self, answers, prompts, responses, stopped):
            return torch.tensor([1.0 if r[-1] == 5 else 0.0 for r in responses])

    # A small init leaves every token likely enough to be tried.
    models = replace(build(ppo, dist, init_std=0.05), scorer=Rewarded())
    rewards = []
    for update in range(1, 41):
        batch = roll(models, ppo, dist, update=update)
        rewards.append(batch.stats.means(dist)["reward"])
        update_models(models, batch.experience, ppo, dist, seed=7, update=update)
    assert sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.9
