"""What users reported of the first step of PPO, each as a test, from models on disk.

The actor's directory comes as published ones do: with dropout, a pad token that is the EOS, and
a generation config that filters by top_k, none of which may reach a rollout or a log-prob.
"""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.config.schema import RunConfig
from rlhf_app.models.scalar_head import (
    RewardFacts,
    ScoreStats,
    load_scalar_model,
    new_scalar_model,
    save_scalar_model,
)
from stages.ppo.models import load_models
from stages.ppo.rollout import collect
from stages.ppo.update import update_models

MEAN, STD = 0.3, 1.7
PROMPTS = [
    PromptExample(str(i), [1, *range(3, 4 + i % 5)], "", Record((Message("user", ""),)))
    for i in range(8)
]


@pytest.fixture
def paths(tmp_path, dist):
    torch.manual_seed(0)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 23)}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    config = tf.GPT2Config(
        vocab_size=23, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1,
        eos_token_id=2, pad_token_id=2, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3,
        initializer_range=0.3,
    )  # fmt: skip
    actor = tf.GPT2LMHeadModel(config)
    actor.generation_config.update(do_sample=True, top_k=3, top_p=0.8, temperature=0.5)
    actor.save_pretrained(tmp_path / "actor")
    tokenizer.save_pretrained(tmp_path / "actor")
    reward = new_scalar_model(
        str(tmp_path / "actor"), dtype=torch.float32, device=dist.device, seed=5
    )
    facts = RewardFacts(ScoreStats(MEAN, STD), 2, (2,), "plain")
    save_scalar_model(reward, tokenizer, tmp_path / "reward", dist, facts)
    return {"actor": str(tmp_path / "actor"), "reward": str(tmp_path / "reward")}


def start(paths, dist, **ppo):
    trained = {"learning_rate": 3e-3, "lr_schedule": "constant"}
    settings = {
        "actor": trained, "critic": trained, "rollout_batch_size": 8, "micro_batch_size": 2,
        "max_prompt_length": 8, "max_response_length": 10, **ppo,
    }  # fmt: skip
    config = RunConfig.model_validate({"data": {"chat_format": "plain"}, "ppo": settings})
    return config.ppo, load_models(config, paths, dist, total_optimizer_steps=8)


def roll(models, ppo, dist, update=1):
    return collect(models, PROMPTS, list(range(8)), ppo, dist, seed=7, update=update)


def test_complaint_trlx345_peers12_the_critic_starts_as_the_reward_model(paths, dist):
    _, models = start(paths, dist)
    ids = torch.tensor([[1, 3, 4, 5, 2], [1, 9, 8, 7, 6]])
    reward = load_scalar_model(paths["reward"], dtype=torch.float32, device=dist.device).eval()
    with torch.no_grad():
        expected = (reward(ids) - MEAN) / STD
        assert expected.std() > 0.1
        torch.testing.assert_close(models.critic(ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_complaint_trl1005_trl417_peers13_kl_is_0_before_the_first_step(paths, dist, temperature):
    """It was negative, from filters, temperatures and dropout in one of the two forwards."""
    ppo, models = start(paths, dist, temperature=temperature)
    batch = roll(models, ppo, dist)
    means = batch.stats.means(dist)
    assert means["kl_per_answer"] == 0.0
    # Under top_k 3 the returned log-probs would be those of another distribution.
    assert means["logprob_gap_max"] < 1e-4
    actions = torch.cat([e.answers.actions_BT[e.answers.action_mask_BT] for e in batch.experience])
    assert len(actions.unique()) > 10


def test_complaint_trl454_peers14_the_ratio_is_1_before_the_first_step(paths, dist):
    ppo, models = start(paths, dist, ppo_epochs=4, mini_batches=2)
    batch = roll(models, ppo, dist)
    numbers = update_models(models, batch.experience, ppo, dist, seed=7, update=1)
    assert numbers["first_ratio"] == 1.0
    assert numbers["optimizer_steps"] == 8
    assert numbers["ratio"] != 1.0


def test_a_warm_up_of_the_critic_does_not_shorten_the_actor_s_schedule(paths, dist):
    linear = {"learning_rate": 1.0, "lr_schedule": "linear", "warmup_ratio": 0.0}
    _, models = start(
        paths, dist, critic_warmup_updates=2, ppo_epochs=2, actor=linear, critic=linear
    )
    # 8 steps are planned; the warm-up takes 2 updates of 2 from the actor, which has 4 left.
    rates = {name: [] for name in ("actor", "critic")}
    for name, steps in (("actor", 4), ("critic", 8)):
        scheduler = getattr(models, name).lr_scheduler
        rates[name] = [scheduler.lr_lambdas[0](step) for step in range(steps)]
    assert rates["actor"] == [1.0, 0.75, 0.5, 0.25]
    assert rates["critic"] == pytest.approx([1 - step / 8 for step in range(8)])
