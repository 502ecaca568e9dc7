"""What users reported of answers that end early, late or at once, each as a test.

The end token's id is that of the padding throughout: 0.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_app.hybrid_engine import HybridEngine, Rollout
from rlhf_app.models.scalar_head import ScoreStats
from stages.ppo.reward import RewardScorer
from stages.ppo.update import update_models

EOS = 0
# Answers of at most 4 tokens, and where the last token of each is counted from its prompt's end.
TABLE = {
    "EOS in the middle": [5, EOS],
    "EOS at the last place": [5, 6, 7, EOS],
    "no EOS": [5, 6, 7, 8],
    "EOS first": [EOS],
    "empty": [],
    "EOS after one more": [9, 9, EOS],
    "no EOS, short": [5, 6],
    "the same id as a prompt's last": [3, EOS],
}


class Position:
    """A reward model whose score of every token is its place in the row."""

    def __call__(self, input_ids, position_ids):
        return position_ids.float()


@pytest.fixture
def with_answers(cases, dist, monkeypatch):
    """Models whose actor gives these answers, and whose critic values everything at 0."""
    return lambda ppo, answers, scorer=None: scripted(
        cases, ppo, dist, monkeypatch, answers, scorer
    )


def scripted(cases, ppo, dist, monkeypatch, answers, scorer):
    models = cases.build(ppo, dist)
    with torch.no_grad():
        models.critic.module.head.weight.zero_()
        models.critic.module.head.bias.zero_()

    def rollout(engine, prompts, params, uids):
        log = [torch.zeros(len(answer)) for answer in answers]
        return Rollout(answers, log, [answer[-1:] == [EOS] for answer in answers], None)

    monkeypatch.setattr(HybridEngine, "rollout", rollout)
    form = cases.IdFormat(stop_ids=(EOS,))
    scorer = scorer or RewardScorer(Position(), ScoreStats(), ppo, form)
    return replace(models, scorer=scorer, chat_format=form)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_complaint_trl3750_trl5303_dse672_peers8_where_the_reward_lands(
    cases, dist, with_answers, rows
):
    """trl#3750, #5303, DSE#672: with pad = EOS the reward fell on padding, one place late or not
    at all, and the penalty for a missing EOS was never taken.

    Values are 0 and lambda is 0, so a return is the reward of its own token.
    """
    ppo = cases.settings(
        gae_lambda=0.0, max_response_length=4, micro_batch_size=rows, reward_clip=1000.0,
        missing_eos_penalty=0.5,
    )  # fmt: skip
    models = with_answers(ppo, list(TABLE.values()))
    batch = cases.roll(models, ppo, dist)
    seen = 0
    for e in batch.experience:
        for row, place in enumerate(e.answers.rows_B.tolist()):
            answer = list(TABLE.values())[place]
            prompt = len(cases.PROMPTS[place].input_ids)
            rewards = [0.0] * e.returns_BT.shape[1]
            if answer:
                # The model reads the last token; 0.5 goes where that is no EOS.
                score = prompt + len(answer) - 1 - (0.0 if answer[-1] == EOS else 0.5)
                rewards[len(answer) - 1] = score
            name = list(TABLE)[place]
            assert e.returns_BT[row].tolist() == pytest.approx(rewards), name
            assert e.answers.action_mask_BT[row].sum() == len(answer), name
            seen += 1
    assert seen == len(TABLE)
    means = batch.stats.means(dist)
    assert means["eos_rate"] == 5 / 8
    assert means["answer_length"] == sum(map(len, TABLE.values())) / 8


@pytest.mark.parametrize("answers", [[[EOS]] * 8, [[EOS], *[[5, 6, EOS]] * 7]])
def test_complaint_ds4226_dse691_dsc3_answers_of_eos_alone_are_trained_on(
    cases, dist, with_answers, answers
):
    """DS#4226, #4301, DSE#691: every answer empty was an IndexError, some were dropped rows."""
    ppo = cases.settings(max_response_length=4)
    models = with_answers(ppo, answers)
    batch = cases.roll(models, ppo, dist)
    assert batch.stats.means(dist)["eos_rate"] == 1.0
    assert sorted(r for e in batch.experience for r in e.answers.rows_B.tolist()) == [*range(8)]
    before = models.actor.module.lm_head.weight.detach().clone()
    numbers = update_models(models, batch.experience, ppo, dist, seed=7, update=1)
    assert numbers["first_ratio"] == 1.0
    assert all(torch.tensor(value).isfinite() for value in numbers.values())
    assert not torch.equal(before, models.actor.module.lm_head.weight)


def test_complaint_dse470_dse503_dsc9_the_end_is_an_action_that_learns(cases, dist, with_answers):
    """PR#470, DSE#503: EOS was suppressed, or its action masked as padding, and never learnt."""

    class One:
        def __call__(self, answers, prompts, responses, stopped):
            return torch.ones(len(responses))

    # Values are 0: every advantage is 1, and EOS the only action there is.
    ppo = cases.settings(max_response_length=2, gae_lambda=1.0, whiten_advantages=False)
    models = with_answers(ppo, [[EOS]] * 8, One())

    def chance():
        with torch.no_grad():
            rows = [torch.tensor([p.input_ids]) for p in cases.PROMPTS]
            logits = torch.stack([models.actor.module(input_ids=ids).logits[0, -1] for ids in rows])
        return logits.log_softmax(-1)[:, EOS]

    before = chance()
    batch = cases.roll(models, ppo, dist)
    assert batch.stats.means(dist)["eos_rate"] == 1.0
    update_models(models, batch.experience, ppo, dist, seed=7, update=1)
    assert (chance() > before).all()
