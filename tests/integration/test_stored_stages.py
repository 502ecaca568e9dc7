"""Stages that read their examples from files train as those that hold them in lists do."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": f"{i:02d} ", "chosen": "yes" * (1 + i % 3), "rejected": "no" * (1 + i % 40)}
    for i in range(24)
]
DATA = {"eval_fraction": 0.25, "max_length": 40, "truncation": {"sft": "drop"}}
STEPS = {"batch_size": 6, "micro_batch_size": 3, "max_steps": 2, "data": DATA}
PPO = {
    "updates": 2,
    "rollout_batch_size": 8,
    "micro_batch_size": 2,
    "max_prompt_length": 8,
    "max_response_length": 6,
    "ptx_coef": 0.5,
    "ptx_batch_size": 4,
    "data": DATA,
}


def numbers(run):
    """Everything that a run wrote down, its times left out."""
    metrics = [
        {k: v for k, v in line.items() if k != "time" and "second" not in k}
        for line in run["metrics"]
    ]
    return metrics, run["result"]["rows"]


@pytest.fixture
def both(run_stage, monkeypatch, tmp_path: Path):
    """Runs a stage on lists and on files."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))

    def kinds():
        files = (tmp_path / "cache" / "tokens").glob("*-*/facts.json")
        return sorted(path.parent.name.split("-")[0] for path in files)

    def run(stage, model, ranks=1, **settings):
        monkeypatch.delenv("TEST_SMALL_ROWS", raising=False)
        before = kinds()
        listed = run_stage(stage, ROWS, model, ranks=ranks, **settings)
        assert kinds() == before  # few rows leave no file
        monkeypatch.setenv("TEST_SMALL_ROWS", "0")
        return listed, run_stage(stage, ROWS, model, ranks=ranks, **settings)

    return run, kinds


def test_demonstrations(both, tiny_lm):
    run, kinds = both
    listed, stored = run("sft", tiny_lm, **STEPS)
    assert numbers(stored) == numbers(listed)
    assert kinds() == ["sft"] * 2  # training and evaluation rows


def test_pairs_and_then_prompts_and_text_on_two_ranks(both, tiny_lm):
    run, kinds = both
    listed, stored = run("reward", tiny_lm, **STEPS)
    assert numbers(stored) == numbers(listed)
    assert listed["result"]["rows"]["dropped"]
    settings = PPO | {"reward_model": str(listed["model"])}
    listed, stored = run("ppo", tiny_lm, ranks=2, **settings)
    assert numbers(stored) == numbers(listed)
    assert kinds() == ["pairs", "pairs", "prompts", "prompts", "text"]
