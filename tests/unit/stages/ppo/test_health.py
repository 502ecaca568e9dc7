"""Signs of a run that goes wrong, on numbers written by hand; and the diversity of a rollout."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch

from rlhf_app.training.distributed import Dist
from stages.ppo.diversity import rollout_diversity
from stages.ppo.health import THRESHOLDS, Health, is_hacking, signs, stop_reason

# Of a healthy run: the embedded task, first and last update.
START = {
    "reward": 0.07, "reward_std": 0.85, "kl_per_answer": 0.0, "entropy": 1.48, "distinct_3": 0.6,
    "unique_answers": 0.95, "answer_length": 16.0, "eos_rate": 1.0,
    "reward_length_correlation": 0.1,
}  # fmt: skip
END = START | {"reward": 1.7, "kl_per_answer": 5.2, "entropy": 1.08, "distinct_3": 0.45}


def kinds(start=START, **now):
    return set(signs(start, END | now))


def test_a_healthy_run_shows_nothing():
    assert kinds() == set()
    assert signs(START, START) == {}
    assert signs({}, {}) == {}
    assert kinds(reward_length_correlation=math.nan) == set()


@pytest.mark.parametrize(
    ("now", "kind"),
    [
        ({"entropy": 0.01}, "entropy"),
        ({"entropy": 0.29}, "entropy"),  # below a fifth of 1.48
        ({"distinct_3": 0.2}, "repetition"),
        ({"unique_answers": 0.4}, "same_answers"),
        ({"kl_per_answer": 16.5}, "kl"),  # more than a nat for each of 16 tokens
        ({"kl_per_answer": 120.0, "answer_length": 500.0}, "kl"),
        ({"eos_rate": 0.0}, "never_ends"),
        ({"reward_std": 0.0}, "reward_std"),
        ({"reward_length_correlation": 0.75}, "reward_is_length"),
    ],
)
def test_complaint_dsc12_each_sign_of_collapse_alone(now, kind):
    assert kinds(**now) == {kind}
    (text,) = signs(START, END | now).values()
    assert "\n" not in text


@pytest.mark.parametrize(
    "now",
    [
        {"entropy": 0.31},
        {"distinct_3": 0.25},
        {"unique_answers": 0.51},
        {"kl_per_answer": 15.5},
        {"kl_per_answer": 99.0, "answer_length": 500.0},
        {"eos_rate": 0.03},
        {"reward_length_correlation": -0.9},  # cut answers lose score: length has a price
        {"answer_length": 30.0},
    ],
)
def test_just_inside_the_thresholds(now):
    assert kinds(**now) == set()


def test_complaint_openrlhf236_peers25_length_runs_away():
    """OpenRLHF#236: answers grow to the length limit and stop ending, reward high all the while."""
    assert kinds(answer_length=25.0, eos_rate=0.6) == {"length"}
    assert kinds(answer_length=64.0, eos_rate=0.0) == {"length"}
    watch = Health()
    watch.update(1, START)
    for update in range(2, 8):
        watch.update(update, END | {"answer_length": 16.0 * update, "eos_rate": 1 / update})
    (warning,) = watch.warnings
    assert (warning["update"], warning["kind"]) == (4, "length")
    assert "length_penalty" in warning["text"]


def test_a_sign_must_last_and_is_told_once(caplog):
    watch = Health(replace(THRESHOLDS, patience=3))
    bad = END | {"reward_std": 0.0}
    with caplog.at_level(logging.WARNING):
        for update, numbers in enumerate([START, bad, bad, END, bad, bad, bad, bad, bad], start=1):
            watch.update(update, numbers)
    assert [(w["update"], w["kind"]) for w in watch.warnings] == [(7, "reward_std")]
    assert len(caplog.records) == 1
    quiet = Health(replace(THRESHOLDS, patience=1), enabled=False)
    with caplog.at_level(logging.WARNING):
        quiet.update(1, bad)
    assert len(caplog.records) == 1
    assert quiet.warnings[0]["kind"] == "reward_std"


def test_answers_that_may_not_end_are_no_sign():
    watch = Health(replace(THRESHOLDS, patience=1), never_ends=True)
    watch.update(1, START | {"eos_rate": 0.0})
    assert watch.warnings == []


def test_advice_fits_any_reward_and_answers_without_an_end():
    texts = signs(START, END | {"eos_rate": 0.0, "reward_std": 0.0})
    assert "ppo.stop_at_eos=false" in texts["never_ends"]
    hacking = is_hacking(evaluation(0.0, 0.5), evaluation(2.0, 0.1), 256)
    for text in (texts["reward_std"], hacking):
        assert "reward model" not in text


def test_a_restored_watch_goes_on():
    bad = END | {"entropy": 0.01}
    first, second = Health(), Health()
    for update, numbers in enumerate([START, bad, bad], start=1):
        first.update(update, numbers)
    second.load_state_dict(first.state_dict())
    second.update(4, bad)
    assert [(w["update"], w["kind"]) for w in second.warnings] == [(4, "entropy")]


def evaluation(reward, gold, spread=0.4):
    return {"reward": reward, "reward_std": 0.8, "gold": gold, "gold_std": spread}


def test_hacking_is_reward_up_and_gold_down_beyond_the_noise():
    # 64 answers: a difference of means has error sqrt(2) x 0.4 / 8 = 0.071 (gold), 0.141 (reward).
    best = evaluation(0.0, 0.7)
    assert is_hacking(best, evaluation(0.29, 0.55), 64) is not None
    assert is_hacking(best, evaluation(0.29, 0.57), 64) is None  # 1.8 errors of gold
    assert is_hacking(best, evaluation(0.27, 0.55), 64) is None  # 1.9 errors of reward
    assert is_hacking(best, evaluation(-0.5, 0.2), 64) is None  # both fell
    assert is_hacking(best, evaluation(0.5, 0.9), 64) is None  # both rose
    assert is_hacking(best, best, 64) is None
    flat = {"reward": 0.0, "reward_std": 0.0, "gold": 1.0, "gold_std": 0.0}
    assert is_hacking(flat, flat, 64) is None
    assert is_hacking(flat, flat | {"reward": 1.0, "gold": 0.5}, 64) is not None


def test_gold_is_compared_with_its_best_evaluation():
    """Over-optimisation (Gao et al. 2023): gold rises first, then falls below its peak."""
    watch = Health()
    for update, (reward, gold) in enumerate([(0.0, 0.4), (0.6, 0.7), (0.9, 0.69), (1.6, 0.45)]):
        golds = [gold + spread for spread in (-0.2, 0.2)] * 32
        watch.evaluation(update, {"reward": reward, "reward_std": 0.8, "gold": gold}, golds)
    (warning,) = watch.warnings
    assert (warning["update"], warning["kind"]) == (3, "hacking")
    assert "0.700 to 0.450" in warning["text"]
    Health().evaluation(0, {"reward": 1.0, "reward_std": 0.1}, [None, None])


def test_training_stops_beyond_the_limit_only():
    assert stop_reason({"kl_per_answer": 7.5}, None) is None
    assert stop_reason({"kl_per_answer": 7.5}, 7.5) is None
    reason = stop_reason({"kl_per_answer": 7.51}, 7.5)
    assert reason == "kl_per_answer 7.510 exceeds ppo.stop_kl 7.5"


ANSWERS = [[1, 2, 3, 4], [1, 2, 3], [1, 2], [], [1, 2, 3], [9, 1, 2, 3, 4], [200_000] * 5]


def test_diversity_by_hand():
    found = rollout_diversity(ANSWERS, Dist(0, 0, 1, torch.device("cpu")))
    # 123 234 | 123 | - | - | 123 | 912 123 234 | three alike: 10 trigrams of 4 kinds.
    assert found == {"unique_answers": 6 / 7, "distinct_3": 4 / 10}
    nothing = rollout_diversity([[], []], Dist(0, 0, 1, torch.device("cpu")))
    assert nothing == {"unique_answers": 0.5, "distinct_3": 0.0}


# Explained variances of runs on SmolLM2-135M: two whose answers ran away, and one with a warm-up.
RAN_AWAY = (-1.75, -1.53, -1.39, -1.56, -1.02, -0.92, -0.74, -0.74, -0.45, -0.16, -0.17, 0.08)
WARMED_UP = (-1.75, -1.36, -0.31, -0.03, -0.17, -0.06, 0.08, 0.11, 0.09, 0.25, 0.19, 0.4)


@pytest.mark.parametrize(
    ("values", "warmup", "warned_at"),
    [
        (RAN_AWAY, 0, 5),
        (RAN_AWAY, 4, 9),
        (WARMED_UP, 4, None),
        ((0.64, -0.13, 0.34, -0.2, -0.1, -0.1, -0.1, 0.5, -0.1), 0, None),
        ((-0.1, -0.1, math.nan, -0.1, -0.1, -0.1), 0, None),
    ],
)
def test_a_critic_worse_than_a_constant_is_told_once_the_actor_learns_from_it(
    values, warmup, warned_at
):
    watch = Health(critic_warmup=warmup)
    for update, value in enumerate(values, 1):
        watch.update(update, END | {"explained_variance": value})
    (warning,) = watch.warnings or [{"update": None, "kind": "critic", "text": "warmup_updates"}]
    assert warning["update"] == warned_at
    assert warning["kind"] == "critic"
    assert "warmup_updates" in warning["text"]


@pytest.mark.parametrize(("explained", "advice"), [(-0.4, "warmup"), (0.3, "ppo.kl_coef")])
def test_answers_that_run_away_are_put_down_to_the_critic_where_it_misleads(explained, advice):
    now = END | {"answer_length": 30.0, "eos_rate": 0.2, "explained_variance": explained}
    assert advice in signs(START, now)["length"]
