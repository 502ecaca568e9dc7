"""Complaints about reward models that are not the policy's kin, each as a test."""

from __future__ import annotations

from pathlib import Path

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
    new_scalar_model,
    save_scalar_model,
)
from rlhf_app.training.distributed import Dist
from stages.ppo.experience import lay_out
from stages.ppo.models import load_parts
from stages.ppo.reward import RewardScorer
from stages.ppo.reward_sources.build import combine

DIST = Dist(0, 0, 1, torch.device("cpu"))
MARKS = ["<pad>", "<s>", "</s>"]
WORDS = ["what", "is", "good", "bad", "very"]
PROMPT, ANSWER, CUT = "what is ", "very good", "bad very"


def save_model(path: Path, words: list[str], width: int) -> Path:
    fast = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tf.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(path)
    config = tf.LlamaConfig(
        vocab_size=len(words), hidden_size=width, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        initializer_range=0.5, bos_token_id=words.index("<s>"), eos_token_id=words.index("</s>"),
        pad_token_id=words.index("<pad>"),
    )  # fmt: skip
    torch.manual_seed(width)
    tf.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    return save_model(tmp_path / "actor", [*MARKS, *WORDS], 16)


@pytest.fixture
def other_words(tmp_path: Path) -> list[str]:
    """The same words under other ids, and more of them than the actor has."""
    return [*MARKS, "is", "bad", "very", "what", "good", "more", "words"]


@pytest.fixture
def reward(tmp_path: Path, other_words: list[str]) -> Path:
    """A reward model whose raw score of a row is known from its own ids alone."""
    trunk = save_model(tmp_path / "trunk", other_words, 8)
    model = new_scalar_model(str(trunk), dtype=torch.float32, device=DIST.device, seed=1)
    tokenizer = tf.AutoTokenizer.from_pretrained(trunk)
    facts = RewardFacts(ScoreStats(0.3, 1.7), 0, (2,), "plain")
    save_scalar_model(model, tokenizer, tmp_path / "reward", DIST, facts)
    return tmp_path / "reward"


def scores(actor: Path, inputs: dict[str, str], rewards: object) -> list[float]:
    """Of an answer that ended and one that was cut, through the models of a run."""
    config = RunConfig.model_validate(
        {
            "data": {"chat_format": "plain"},
            "ppo": {"rewards": rewards, "max_prompt_length": 8, "max_response_length": 8},
        }
    )
    parts = load_parts(config, {"actor": str(actor), **inputs}, DIST)
    model = None
    if parts.reward is not None:
        model = RewardScorer(
            parts.reward.eval(), parts.stats, config.ppo, parts.chat_format, parts.reward_format
        )
    scorer = combine(config.ppo, model, parts.texts, parts.chat_format, DIST)
    words = [*MARKS, *WORDS]
    prompt_ids = [words.index(word) for word in PROMPT.split()]
    responses = [[words.index(word) for word in text.split()] for text in (ANSWER, CUT)]
    responses[0].append(words.index("</s>"))
    record = Record((Message("user", PROMPT),))
    prompts = [PromptExample("u", prompt_ids, PROMPT, record)] * 2
    answers = lay_out([prompt_ids] * 2, responses)
    return scorer(answers, prompts, responses, [True, False]).tolist()


@torch.no_grad()
def of_its_own_ids(reward: Path, words: list[str], text: str) -> float:
    """By plain transformers: the head over the last hidden state of a row in the RM's ids."""
    trunk = tf.AutoModel.from_pretrained(reward).eval()
    classifier = tf.AutoModelForSequenceClassification.from_pretrained(reward)
    ids = torch.tensor([[words.index(word) for word in text.split()]])
    last = trunk(input_ids=ids).last_hidden_state[0, -1]
    return (last @ classifier.score.weight[0]).item()


def test_complaint_peers10_dsc10_a_reward_model_with_another_tokenizer(actor, reward, other_words):
    """trl#1674, #1979, #3595: the actor's ids mean other words, or none, to the reward model."""
    found = scores(actor, {"reward": str(reward)}, "model")
    ended = of_its_own_ids(reward, other_words, f"{PROMPT}{ANSWER} </s>")
    cut = of_its_own_ids(reward, other_words, f"{PROMPT}{CUT}")
    expected = [(ended - 0.3) / 1.7, (cut - 0.3) / 1.7 - 1.0]
    assert found == pytest.approx(expected, abs=1e-5)


def test_complaint_openrlhf242_any_classifier_of_another_family_scores_a_policy(
    actor, reward, other_words
):
    """*Use a remote reward model* was the answer; here it is a source like another.

    The directory is read as a plain sequence classifier: no statistics, no format of ours.
    """
    found = scores(actor, {}, [{"classifier": str(reward), "input": "text", "weight": 2}])
    expected = [
        2 * of_its_own_ids(reward, other_words, f"{PROMPT}{answer}") for answer in (ANSWER, CUT)
    ]
    assert found == pytest.approx([expected[0], expected[1] - 1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("source", "mean", "std", "weight"),
    [
        ({}, 0.3, 1.7, 1.0),
        ({"weight": -0.5}, 0.3, 1.7, -0.5),
        ({"mean": 2.0, "std": 0.001, "weight": 3}, 2.0, 0.001, 3.0),
    ],
)
def test_complaint_peers12_the_critic_starts_as_the_reward(actor, source, mean, std, weight):
    """trlx#345: on the scale on which the reward model's scores arrive, weight included."""
    words = [*MARKS, *WORDS]
    path = save_model(actor.parent / "kin", words, 8)
    model = new_scalar_model(str(path), dtype=torch.float32, device=DIST.device, seed=1)
    facts = RewardFacts(ScoreStats(0.3, 1.7), 0, (2,), "plain")
    tokenizer = tf.AutoTokenizer.from_pretrained(path)
    save_scalar_model(model, tokenizer, actor.parent / "rm", DIST, facts)
    config = RunConfig.model_validate(
        {
            "data": {"chat_format": "plain"},
            "ppo": {
                "rewards": [{"model": True, **source}], "max_prompt_length": 8,
                "max_response_length": 8,
            },
        }
    )  # fmt: skip
    inputs = {"actor": str(actor), "reward": str(actor.parent / "rm")}
    critic = load_parts(config, inputs, DIST).critic
    text = f"{PROMPT}{ANSWER} </s>"
    ids = torch.tensor([[words.index(word) for word in text.split()]])
    raw = of_its_own_ids(actor.parent / "rm", words, text)
    expected = weight * (raw - mean) / std
    assert critic(ids)[0, -1].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_without_a_reward_model_the_critic_starts_neutral(actor):
    """From the actor's own trunk, with values of exactly 0."""
    config = RunConfig.model_validate(
        {"ppo": {"rewards": "math:fsum", "max_prompt_length": 8, "max_response_length": 8}}
    )
    parts = load_parts(config, {"actor": str(actor)}, DIST)
    assert parts.reward is None
    ids = torch.tensor([[1, 3, 4, 2]])
    assert parts.critic(ids).abs().max().item() == 0.0
    trunk = tf.AutoModel.from_pretrained(actor)
    for name, weight in trunk.state_dict().items():
        assert torch.equal(parts.critic.backbone.state_dict()[name], weight), name
