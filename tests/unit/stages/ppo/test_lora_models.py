"""PPO with adapters: two models over one base, exact at step 0, and the base never moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.config.schema import RunConfig
from rlhf_app.models.scalar_head import (
    RewardFacts,
    ScalarHeadModel,
    ScoreStats,
    load_scalar_model,
    new_scalar_model,
    save_scalar_model,
)
from rlhf_app.training.saving import gather_state_dict
from stages.ppo.models import PPOModels, load_models
from stages.ppo.rollout import collect
from stages.ppo.update import update_models

IDS = torch.arange(3, 19).view(2, 8)
PROMPTS = [
    PromptExample(str(i), [1, *range(3, 4 + i % 5)], "", Record((Message("user", ""),)))
    for i in range(8)
]


def save_tokenizer(path: Path, words: int) -> tf.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, words)}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(path)
    return tokenizer


@pytest.fixture
def paths(tmp_path, dist) -> dict[str, str]:
    """An actor, and a reward model of another size that reads the same ids."""

    def config(width: int, words: int = 23) -> tf.LlamaConfig:
        return tf.LlamaConfig(
            vocab_size=words, hidden_size=width, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip

    torch.manual_seed(0)
    for name, width, words in (("actor", 32, 23), ("trunk", 16, 23), ("other", 16, 29)):
        tf.LlamaForCausalLM(config(width, words)).save_pretrained(tmp_path / name)
        tokenizer = save_tokenizer(tmp_path / name, words)
        if name != "actor":
            scalar = new_scalar_model(
                str(tmp_path / name), dtype=torch.float32, device=dist.device, seed=0
            )
            facts = RewardFacts(ScoreStats(0.3, 1.7), 0, (2,), "plain")
            save_scalar_model(scalar, tokenizer, tmp_path / f"{name}-reward", dist, facts)
    names = {"actor": "actor", "reward": "trunk-reward", "other": "other-reward"}
    return {key: str(tmp_path / name) for key, name in names.items()}


def configure(actor_rank: int, critic_rank: int, engine=None, **ppo) -> RunConfig:
    lora = {"learning_rate": 3e-3}
    return RunConfig.model_validate(
        {
            "data": {"chat_format": "plain"},
            "ppo": {
                # With adapters these must not be used: nothing would be learnt.
                "actor": {
                    **(engine or {}),
                    "learning_rate": 1e-9, "lr_schedule": "constant",
                    "lora": {**lora, "rank": actor_rank},
                },
                "critic": {
                    **(engine or {}),
                    "learning_rate": 1e-9, "lr_schedule": "constant",
                    "lora": {**lora, "rank": critic_rank},
                },
                "rollout_batch_size": 8, "micro_batch_size": 2, "max_prompt_length": 8,
                "max_response_length": 10, **ppo,
            },
        }
    )  # fmt: skip


def load(config: RunConfig, paths: dict[str, str], dist, reward: str = "reward") -> PPOModels:
    inputs = {"actor": paths["actor"], "reward": paths[reward]}
    return load_models(config, inputs, dist, total_optimizer_steps=8)


def roll(models, config, dist, update=1):
    return collect(models, PROMPTS, list(range(8)), config.ppo, dist, seed=7, update=update)


def train(models, config, dist, update=1):
    batch = roll(models, config, dist, update)
    numbers = update_models(models, batch.experience, config.ppo, dist, seed=7, update=update)
    return batch, numbers


def state_of(engine, dist) -> dict[str, torch.Tensor]:
    return gather_state_dict(engine.module, dist)


def weights(*modules) -> int:
    """Numbers stored by all parameters together, each storage once."""
    storages = {}
    for module in modules:
        for parameter in getattr(module, "parameters", tuple)():
            storage = parameter.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes() // parameter.element_size()
    return sum(storages.values())


@pytest.mark.parametrize(("actor_rank", "critic_rank"), [(4, 4), (4, 0), (0, 4), (0, 0)])
def test_step_0_is_exact_and_the_frozen_two_never_move(actor_rank, critic_rank, paths, dist):
    config = configure(actor_rank, critic_rank)
    models = load(config, paths, dist)
    plain = load_scalar_model(paths["reward"], dtype=torch.float32, device=dist.device)
    sft = tf.AutoModelForCausalLM.from_pretrained(paths["actor"])

    def check_frozen() -> None:
        with torch.no_grad():
            assert torch.equal(models.scorer.model(IDS), plain(IDS))
            reference = models.reference(input_ids=IDS, use_cache=False).logits
            assert torch.equal(reference, sft(IDS).logits)

    check_frozen()
    with torch.no_grad():
        assert torch.allclose(models.critic(IDS), (plain(IDS) - 0.3) / 1.7, atol=1e-6)
    batch, numbers = train(models, config, dist)
    assert batch.stats.means(dist)["kl_per_answer"] == 0.0
    assert numbers["first_ratio"] == 1.0
    for update in (2, 3):
        batch, _ = train(models, config, dist, update)
    means = batch.stats.means(dist)
    # At a rate of 1e-9 a model without adapters stands still.
    assert (abs(means["kl_per_answer"]) > 1e-3) == (actor_rank > 0)
    assert means["logprob_gap_max"] < 1e-4
    check_frozen()


def test_one_base_serves_two_models(paths, dist):
    """Bytes of all four models: two bases and the adapters, where it was four bases."""
    actor = tf.AutoModelForCausalLM.from_pretrained(paths["actor"])
    trunk = load_scalar_model(paths["reward"], dtype=torch.float32, device=dist.device)
    bases = sum(p.numel() for p in actor.parameters()), sum(p.numel() for p in trunk.parameters())
    for ranks, copies in (((0, 0), (2, 2)), ((4, 0), (1, 2)), ((0, 4), (2, 1)), ((4, 4), (1, 1))):
        models = load(configure(*ranks), paths, dist)
        modules = (
            models.actor.module, models.critic.module, models.reference, models.scorer.model,
        )  # fmt: skip
        held = weights(*modules)
        adapters = sum(
            p.numel()
            for module in modules[:2]
            for name, p in module.named_parameters()
            if "lora_" in name
        )
        second_head = 17 if ranks[1] else 0  # the reward model's own, 16 weights and a bias
        wanted = sum(n * base for n, base in zip(copies, bases, strict=True))
        assert held == wanted + adapters + second_head


@pytest.mark.parametrize("rank", [0, 4])
def test_without_a_critic_none_is_made_and_the_reward_model_stands_alone(rank, paths, dist):
    """Adapters of the critic are asked for all the same, as `--lora-rank` does."""
    config = configure(rank, rank, advantage_estimator="rloo", answers_per_prompt=2)
    models = load(config, paths, dist)
    plain = load_scalar_model(paths["reward"], dtype=torch.float32, device=dist.device)
    assert models.critic is None
    assert isinstance(models.scorer.model, ScalarHeadModel)
    actor = tf.AutoModelForCausalLM.from_pretrained(paths["actor"])
    adapters = sum(
        p.numel() for name, p in models.actor.module.named_parameters() if "lora_" in name
    )
    held = weights(models.actor.module, models.reference, models.scorer.model)
    actors = 1 if rank else 2  # with adapters the reference is the actor's base
    assert held == actors * weights(actor) + weights(plain) + adapters
    for update in (1, 2):
        train(models, config, dist, update)
    with torch.no_grad():
        assert torch.equal(models.scorer.model(IDS), plain(IDS))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_training_leaves_both_bases_bit_for_bit(zero, paths, dist):
    # Checkpointing as well: with all of the base frozen it must still reach the adapters.
    engine = {"zero_stage": zero, "gradient_checkpointing": True}
    config = configure(4, 4, engine=engine)
    models = load(config, paths, dist)
    before = [state_of(engine, dist) for engine in (models.actor, models.critic)]
    for update in (1, 2):
        train(models, config, dist, update)
    after = [state_of(engine, dist) for engine in (models.actor, models.critic)]
    for old, new, heads in zip(before, after, (0, 2), strict=True):
        assert all(value.numel() for value in old.values())
        moved = {key for key in old if not torch.equal(old[key], new[key])}
        assert {key for key in moved if "lora_" not in key and not key.startswith("head.")} == set()
        assert len(moved) == 2 * 14 + heads


def test_fused_rollouts_sample_the_same_policy(paths, dist):
    config = configure(4, 0)
    models = load(config, paths, dist)
    train(models, config, dist)
    unfused = roll(models, config, dist, 2)
    models.actor.generator.lora_rollout = "fused"
    fused = roll(models, config, dist, 2)
    for a, b in zip(unfused.experience, fused.experience, strict=True):
        assert torch.equal(a.answers.input_ids_BL, b.answers.input_ids_BL)
    lora = {"rollout": "fused", "rank": 1}
    config = configure(1, 0, actor={"lora": lora})
    assert load(config, paths, dist).actor.generator.lora_rollout == "fused"


def test_a_reward_model_of_other_ids_stays_apart(paths, dist):
    config = configure(4, 4)
    models = load(config, paths, dist, reward="other")
    assert models.scorer.own_format is not None
    assert models.scorer.model.backbone is not models.critic.module.backbone
    # The critic then stands on the actor's own beginning, with adapters of its own.
    assert models.critic.module.config.hidden_size == 32
    assert not models.critic(IDS).any()
    names = [n for n, p in models.critic.module.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 14 + 2
    assert names[-2:] == ["head.weight", "head.bias"]


@pytest.mark.slow
def test_complaint_dsc11_adapters_learn_a_reward_at_their_own_rate(paths, dist):
    """DeepSpeed-Chat trains LoRA at the base's rate, and its reward stays flat."""
    config = configure(8, 8, stop_at_eos=False, max_response_length=1, mini_batches=2, ppo_epochs=2)
    models = load(config, paths, dist)

    class Rewarded:
        def __call__(self, answers, prompts, responses, stopped):
            return torch.tensor([1.0 if r[-1] % 2 else 0.0 for r in responses])

    models = PPOModels(**{**vars(models), "scorer": Rewarded()})
    rewards = []
    for update in range(1, 31):
        batch, _ = train(models, config, dist, update)
        rewards.append(batch.stats.means(dist)["reward"])
    assert sum(rewards[:3]) / 3 < 0.75
    assert sum(rewards[-5:]) / 5 > 0.9
