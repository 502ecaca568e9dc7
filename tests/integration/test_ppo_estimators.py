"""The PPO stage without a critic, in processes of its own."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAIRS = [
    {"prompt": f"{i:02d} ", "chosen": "yes" * (1 + i % 3), "rejected": "no" * (1 + i % 4)}
    for i in range(24)
]
# With mini-batches of 4 each rank has two answers to each prompt.
PPO = {
    "advantage_estimator": "rloo",
    "answers_per_prompt": 4,
    "kl_estimator": "k2",
    "kl_controller": "adaptive",
    "kl_target": 0.001,
    "kl_horizon": 16.0,
    "entropy_coef": 0.01,
    "length_penalty": 0.05,
    "dual_clip": 3.0,
    "actor": {"learning_rate": 1e-3},
    "updates": 3,
    "rollout_batch_size": 8,
    "ppo_epochs": 2,
    "mini_batches": 2,
    "micro_batch_size": 2,
    "max_prompt_length": 8,
    "max_response_length": 6,
    "data": {"eval_fraction": 0.25},
}
COMPARED = (
    "loss", "reward", "kl_per_answer", "kl_coef", "entropy", "answer_length", "grad_norm", "ratio",
)  # fmt: skip


def test_two_ranks_with_split_weights_learn_as_one_process(run_stage, tiny_lm):
    reward = run_stage(
        "reward", PAIRS, tiny_lm, learning_rate=1e-3, batch_size=4, micro_batch_size=4,
        data={"eval_fraction": 0.25},
    )  # fmt: skip
    runs = [
        run_stage(
            "ppo", PAIRS, tiny_lm, ranks=ranks, reward_model=str(reward["model"]),
            **PPO | {"actor": PPO["actor"] | {"zero_stage": zero}},
        )
        for ranks, zero in ((1, 0), (2, 3))
    ]  # fmt: skip
    alone, split = ([{k: r[k] for k in COMPARED if k in r} for r in run["metrics"]] for run in runs)
    for mine, theirs in zip(alone, split, strict=True):
        assert theirs == pytest.approx(mine, rel=2e-3, abs=2e-4)
    for run in runs:
        directory = Path(run["model"]).parent
        assert (directory / "actor").is_dir()
        assert not (directory / "critic").exists()
        text = (directory / "metrics.jsonl").read_text() + json.dumps(run["result"])
        assert "critic" not in text
        assert "value_loss" not in text
        assert "explained_variance" not in text
    records = [r for r in runs[0]["metrics"] if r["kind"] == "train"]
    assert records[0]["kl_per_answer"] == 0.0
    # 8 answers of a horizon of 16: at most a tenth an update, down after one without KL.
    assert records[1]["kl_coef"] == pytest.approx(0.9 * records[0]["kl_coef"])
    error = max(-0.2, min(0.2, records[1]["kl_per_answer"] / 0.001 - 1))
    assert records[2]["kl_coef"] == pytest.approx((1 + error / 2) * records[1]["kl_coef"])
