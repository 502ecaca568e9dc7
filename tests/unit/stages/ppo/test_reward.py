"""Scoring answers whose reward model has its own tokenizer, format or limits."""

from dataclasses import dataclass

import pytest

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.config.schema import PPOConfig
from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_format import EncodedAnswer, UnsupportedTurns
from rlhf_app.models.scalar_head import ScoreStats
from stages.ppo.experience import lay_out
from stages.ppo.reward import RewardScorer

END = 9


class Letters:
    """One id a character; ends with END, as a chat format does."""

    stop_ids = (END,)

    def encode(self, messages, response, rendered=False):
        if messages[0][1] == "refused":
            raise UnsupportedTurns("no such role")
        context = [10 + ord(c) - ord("a") for c in messages[0][1]]
        answer = [10 + ord(c) - ord("a") for c in response]
        return EncodedAnswer([*context, *answer, END], len(context))

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


@dataclass
class LastId:
    """A reward model whose score at a token is the token; it keeps what it was asked."""

    positions: int = 100

    def __post_init__(self):
        self.asked = []

    @property
    def config(self):
        from types import SimpleNamespace

        return SimpleNamespace(
            max_position_embeddings=self.positions, get_text_config=lambda: self.config
        )

    def __call__(self, input_ids, position_ids):
        assert input_ids.shape[1] <= self.positions
        self.asked.append(input_ids.tolist())
        return input_ids.float()


def scorer(model):
    settings = PPOConfig(reward_clip=1000.0, missing_eos="ignore")
    return RewardScorer(model, ScoreStats(), settings, Letters(), Letters())


def prompt(text):
    return PromptExample("u", [1], text, Record((Message("user", text),)))


def test_answers_are_reencoded_and_an_unfinished_one_gets_no_end():
    model = LastId()
    prompts, responses = [prompt("ab"), prompt("c")], [[3], [4, 5]]
    scores = scorer(model)(lay_out([[1], [1]], responses), prompts, responses, [True, False])
    assert model.asked == [[[10, 11, 13, END], [12, 14, 15, 0]]]
    assert scores.tolist() == [END, 15.0]


def test_rows_fit_the_reward_model_s_positions():
    model = LastId(positions=4)
    prompts, responses = [prompt("abcdef")], [[6, 7]]
    scorer(model)(lay_out([[1]], responses), prompts, responses, [True])
    assert model.asked == [[[15, 16, 17, END]]]


def test_turns_that_its_template_refuses_name_the_prompt():
    prompts, responses = [prompt("refused")], [[1]]
    with pytest.raises(ConfigError, match="prompt u cannot be written"):
        scorer(LastId())(lay_out([[1]], responses), prompts, responses, [True])
