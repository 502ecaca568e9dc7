"""Every stage trains from a stream, and ranks see the same one."""

import json

import pytest

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": f"{i:02d} ", "chosen": "yes" * (1 + i % 3), "rejected": "no" * (1 + i % 4)}
    for i in range(40)
]
DATA = {"eval_fraction": 0.25, "max_length": 40, "streaming": True, "shuffle_buffer": 7}
STEPS = {"batch_size": 8, "micro_batch_size": 2, "max_steps": 6, "data": DATA}
PPO = {
    "updates": 6,
    "rollout_batch_size": 8,
    "micro_batch_size": 2,
    "max_prompt_length": 8,
    "max_response_length": 6,
    "data": DATA,
}


def losses(run):
    return [line["loss"] for line in run["metrics"] if line["kind"] == "train"]


def test_pairs_and_then_prompts_on_one_rank_and_on_two(run_stage, tiny_lm):
    alone = run_stage("reward", ROWS, tiny_lm, **STEPS)
    together = run_stage("reward", ROWS, tiny_lm, ranks=2, **STEPS)
    assert len(losses(alone)) == 6  # 48 rows: more than one pass
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)
    ppo = run_stage("ppo", ROWS, tiny_lm, ranks=2, **PPO, reward_model=str(alone["model"]))
    assert len([line for line in ppo["metrics"] if line["kind"] == "train"]) == 6
    assert json.dumps(ppo["result"]["rows"])


def test_demonstrations(run_stage, tiny_lm):
    run = run_stage("sft", ROWS, tiny_lm, **STEPS)
    assert len(losses(run)) == 6
    assert losses(run)[-1] < losses(run)[0]
