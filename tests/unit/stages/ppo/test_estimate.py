"""Each estimator on one table of answers, on one rank and on two that share a prompt's answers."""

import math

import pytest
import torch

from rlhf_app.config.schema import PPOConfig
from stages.ppo.estimate import estimate_advantages
from stages.ppo.rollout_stats import RolloutStats, ScoredAnswers, rollout_sums

# Two prompts with three answers each.
SCORES = [1.0, 2.0, 6.0, 0.0, 0.0, 3.0]
LOG_RATIOS = [[0.5], [1.0, -2.0], [2.0], [0.0], [1.0], [0.5, 0.5]]
SPLITS = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 3, 4], [1, 2, 5]]}


def scored(uids, values=None) -> tuple[ScoredAnswers, torch.Tensor]:
    mask = torch.tensor([[t < len(LOG_RATIOS[uid]) for t in range(2)] for uid in uids])
    ratios = torch.tensor([(LOG_RATIOS[uid] + [0.0])[:2] for uid in uids])
    zeros = torch.zeros(len(uids), 2)
    answers = ScoredAnswers(
        mask_NT=mask, sampled_NT=ratios, old_NT=ratios, reference_NT=zeros, entropy_NT=zeros,
        values_NT=values, scores_N=torch.tensor([SCORES[uid] for uid in uids]),
    )  # fmt: skip
    return answers, ratios


def advantages(on_ranks, ranks, critic=False, **settings) -> dict[int, list[float]]:
    """uid -> advantages of its tokens."""
    ppo = PPOConfig(**{"rollout_batch_size": 6, "answers_per_prompt": 3, **settings})

    def run(dist):
        uids = SPLITS[ranks][dist.rank]
        answers, ratios = scored(uids, torch.zeros(len(uids), 2) if critic else None)
        found, returns = estimate_advantages(answers, ratios, uids, ppo, dist, kl_coef=ppo.kl_coef)
        assert (returns is None) == (not critic)
        assert not found[~answers.mask_NT].any()
        return {
            uid: row[mask].tolist()
            for uid, row, mask in zip(uids, found, answers.mask_NT, strict=True)
        }

    return {uid: row for part in on_ranks(ranks, run) for uid, row in part.items()}


R7, R3 = math.sqrt(7) + 1e-4, math.sqrt(3) + 1e-4
CASES = {
    # Rewards .95 2.1 5.8 and 0 -.1 2.9: the score minus a tenth of the whole answer's KL.
    "rloo": (
        {"advantage_estimator": "rloo"},
        [[-3.0], [-1.275] * 2, [4.275], [-1.4], [-1.55], [2.95] * 2],
    ),
    # k2 of the same: .5^2/2, (1 + 4)/2, 2, 0, .5, .25.
    "rloo with k2": (
        {"advantage_estimator": "rloo", "kl_estimator": "k2", "kl_coef": 1.0},
        # Rewards .875 -.5 4 and 0 -.5 2.75.
        [[-0.875], [-2.9375] * 2, [3.8125], [-1.125], [-1.875], [3.0] * 2],
    ),
    # The KL is in the loss: scores alone, means 3 and 1, sample variances 7 and 3.
    "group": (
        {"advantage_estimator": "group", "kl_penalty": "loss", "kl_estimator": "k3"},
        [[-2 / R7], [-1 / R7] * 2, [3 / R7], [-1 / R3], [-1 / R3], [2 / R3] * 2],
    ),
    # Scores minus the prompt's mean are -2 -1 3 and -1 -1 2; each token pays for its own KL.
    "reinforce_pp": (
        {"advantage_estimator": "reinforce_pp", "gamma": 0.5},
        [[-2.05], [-0.5, -0.8], [2.8], [-1.0], [-1.1], [0.925, 1.95]],
    ),
    "reinforce_pp, one answer a prompt": (
        {"advantage_estimator": "reinforce_pp", "gamma": 0.5, "answers_per_prompt": 1},
        [[0.95], [1.0, 2.2], [5.8], [0.0], [-0.1], [1.425, 2.95]],
    ),
    "a clamp on each token's penalty": (
        {"advantage_estimator": "rloo", "kl_clamp": 1.0},
        # uid 1: 1 - 1 nats in place of 1 - 2; uid 2: 1 in place of 2. Rewards .95 2 5.9.
        [[-3.0], [-1.425] * 2, [4.425], [-1.4], [-1.55], [2.95] * 2],
    ),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_by_hand(case, ranks, on_ranks):
    settings, expected = CASES[case]
    found = advantages(on_ranks, ranks, **settings)
    for uid, row in enumerate(expected):
        assert found[uid] == pytest.approx(row, abs=1e-6), uid


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_same_bits_as_one(case, on_ranks):
    one, two = (advantages(on_ranks, ranks, **CASES[case][0]) for ranks in (1, 2))
    assert one == two


@pytest.mark.parametrize("ranks", [1, 2])
def test_whitened_rewards_keep_their_mean(ranks, on_ranks):
    """Token rewards at kl_coef 0 are the scores and two zeros: 1 0 2 6 0 0 0 3, mean 1.5, variance
    50/8 - 2.25 = 4; (r - 1.5)/2 + 1.5 is 1.25 .75 1.75 3.75 .75 .75 .75 2.25."""
    found = advantages(
        on_ranks, ranks, critic=True, answers_per_prompt=1, kl_coef=0.0, gae_lambda=0.0, gamma=1e-9,
        whiten_rewards=True,
    )  # fmt: skip
    expected = [[1.25], [0.75, 1.75], [3.75], [0.75], [0.75], [0.75, 2.25]]
    for uid, row in enumerate(expected):
        assert found[uid] == pytest.approx(row, abs=1e-6), uid


def test_the_reported_kl_is_summed_over_tokens_and_averaged_over_answers_of_all_ranks(on_ranks):
    """k1 whatever the penalty is: .5 - 1 + 2 + 0 + 1 + 1 = 3.5 nats over six answers."""

    def run(dist):
        answers, ratios = scored(SPLITS[2][dist.rank])
        sums = {name: float(value) for name, value in rollout_sums(answers, ratios, None).items()}
        tokens = int(answers.mask_NT.sum())
        known = {
            "answers": 3, "tokens": tokens, "stopped": 0, "row_tokens": 1, "computed_tokens": 1,
        }  # fmt: skip
        return RolloutStats(sums | known).means(dist)

    for means in on_ranks(2, run):
        assert means["kl_per_answer"] == pytest.approx(3.5 / 6)
        assert means["answers"] == 6
        assert "explained_variance" not in means
