"""Rollout, scoring, update and evaluation give the same on one rank and on two, split or whole."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("ppo_ranks.py")


@pytest.fixture(scope="module")
def run(run_ranks, tmp_path_factory):
    def start(ranks, zero_stage, weights, budget=0):
        out = tmp_path_factory.mktemp("ranks") / "out.json"
        done = run_ranks(WORKER, out, zero_stage, weights, budget, ranks=ranks, timeout=140)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(out.read_text())

    return start


@pytest.fixture(scope="module")
def alone(run):
    return run(1, 0, "pinned")


@pytest.mark.parametrize(
    ("stage", "weights"),
    [(3, "pinned"), (3, "unpinned"), (3, "native"), (3, "sliced"), (0, "sliced")],
)
def test_complaint_dsc3_one_rank_answers_with_eos_alone(run, alone, stage, weights):
    """Empty answers broke PPO; under ZeRO-3 a rank that stops first must not stop the others."""
    check(alone, run(2, stage, weights))


@pytest.mark.parametrize(("ranks", "stage", "budget"), [(1, 0, 30), (2, 0, 13), (2, 3, 30)])
def test_a_token_budget_changes_no_number(run, alone, ranks, stage, budget):
    """One rank has single-token answers, the other long ones: each cuts its rows in its own way."""
    check(alone, run(ranks, stage, "pinned", budget))


def check(alone, split):
    assert split["answers"] == alone["answers"]
    assert split["texts"] == alone["texts"]
    assert [split["answers"][f"1/{uid}"] for uid in range(4)] == [[2]] * 4
    assert max(len(split["answers"][f"1/{uid}"]) for uid in range(4, 8)) > 5
    # Rounding noise, and what depends on the cut and on time.
    not_compared = {"logprob_gap_mean", "logprob_gap_max", "padding_share"}
    not_compared |= {name for name in alone["numbers"][0] if name.endswith("_seconds")}
    for mine, theirs in zip(alone["numbers"], split["numbers"], strict=True):
        for name in mine.keys() - not_compared:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-5), name
        assert theirs["logprob_gap_max"] < 1e-4
    assert split["numbers"][0]["first_ratio"] == 1.0
    assert split["numbers"][0]["kl_per_answer"] == 0.0
    # Two updates of two steps, then one that ends after the step that saw the first one's KL.
    assert alone["steps"] == [[2, 6, 6]]
    assert split["steps"] == [[2, 6, 6]] * len(split["steps"])
    assert {"reward_length_correlation", "entropy"} <= alone["evaluations"][0].keys()
    for mine, theirs in zip(alone["evaluations"], split["evaluations"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-5)
