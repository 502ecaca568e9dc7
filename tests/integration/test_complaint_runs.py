"""What users reported of whole runs, each as a test: rows, a constant reward, the unit of the KL.

The stages run in this process.
"""

from __future__ import annotations

import importlib
import json

import pytest

from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.run_directory import RunDirectory

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tiny_lm, tmp_path):
    """Runs a stage here; returns result.json, with the metrics records."""

    def run(stage, rows, data=None, **settings):
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        out = RunDirectory(tmp_path / "out")
        values = {
            "output_dir": str(out.path), "stages": [stage], "model": {"actor": str(tiny_lm)},
            "data": {
                "sources": [{"path": str(source)}], "split": "shared", "chat_format": "plain",
                "eval_fraction": 0.25, **(data or {}),
            },
            stage: settings,
        }  # fmt: skip
        importlib.import_module(f"stages.{stage}.train").main(RunConfig(**values), out)
        lines = out.metrics(stage).read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return {**json.loads(out.result(stage).read_text()), "metrics": records}

    return run


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        ("sft", "prompt fills the length limit"),
        ("reward", "pair longer than the limit"),
    ],
)
def test_complaint_trl3927_trl6025_peers2_no_row_left_to_learn_from_is_an_error(
    start, stage, reason
):
    """trl#6668, #3927, #6025: all labels masked, loss 0 or NaN, and training went on."""
    rows = [
        {"prompt": f"{i} {'long ' * 8}", "chosen": "yes", "rejected": "no"} for i in range(16)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=rf"^{stage}: 0 training .*'{reason}': 16.*max_length"):
        start(stage, rows, data={"max_length": 16})


def test_complaint_peers2_rows_without_a_label_are_left_out_and_counted(start):
    short = [{"prompt": f"{i}", "response": "yes"} for i in range(12)]
    rows = [*short, *({"prompt": f"{i} {'long ' * 8}", "response": "no"} for i in range(12, 16))]
    settings = {"batch_size": 2, "micro_batch_size": 1, "epochs": 1, "samples": 0}
    result = start("sft", rows, data={"max_length": 16}, **settings)
    assert result["rows"]["train"] + result["rows"]["eval"] == 12
    assert result["rows"]["dropped"] == {"prompt fills the length limit": 4}
    assert result["steps"] == -(-result["rows"]["train"] // 2)


def test_complaint_dse586_dsc12_a_constant_reward_is_told(start, tmp_path):
    """DSE#586, #518: documented runs ended with a reward of .2060 in every step, unnoticed."""
    scorer = tmp_path / "constant.py"
    scorer.write_text("def score(prompts, responses):\n    return [0.2060] * len(responses)\n")
    rows = [{"prompt": f"{i:02d} "} for i in range(24)]
    result = start(
        "ppo", rows, rewards=[{"function": f"{scorer}:score"}], updates=4, rollout_batch_size=4,
        micro_batch_size=4, max_prompt_length=8, max_response_length=4, eval_prompts=2,
        missing_eos="ignore",
    )  # fmt: skip
    (warning,) = [w for w in result["warnings"] if w["kind"] == "reward_std"]
    assert warning["update"] <= 4
    assert "\n" not in warning["text"]


def test_complaint_the_adaptive_kl_of_a_run_is_fed_nats_per_answer(start, tmp_path):
    """A mean per token of answers of 16 lies below a target that the answers' KL exceeds: the
    coefficient would fall where it must rise."""
    scorer = tmp_path / "early.py"
    scorer.write_text(
        "def score(prompts, responses):\n    return [sum(c < 'n' for c in r) for r in responses]\n"
    )
    rows = [{"prompt": f"{i:02d} "} for i in range(24)]
    target = 1.0
    run = start(
        "ppo", rows, rewards=[{"function": f"{scorer}:score"}], updates=4, rollout_batch_size=8,
        micro_batch_size=8, max_prompt_length=8, max_response_length=16, eval_prompts=2,
        stop_at_eos=False, ppo_epochs=4,
        actor={"learning_rate": 3e-2, "lr_schedule": "constant", "warmup_ratio": 0.0},
        kl_controller="adaptive", kl_target=target, kl_horizon=16,
    )  # fmt: skip
    records = [record for record in run["metrics"] if record["kind"] == "train"]
    coef = [record["kl_coef"] for record in records]
    assert coef[:2] == pytest.approx([0.1, 0.1 * 0.9])  # no KL at first: down by .2 x 8/16
    assert records[2]["answer_length"] == 16
    assert 1.2 * target < records[2]["kl_per_answer"] < 0.8 * 16 * target
    assert coef[3] == pytest.approx(1.1 * coef[2])
