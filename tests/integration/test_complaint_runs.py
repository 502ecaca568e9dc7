"""What users reported of whole runs, each as a test: no usable row, and a reward that is constant.

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
    """Runs a stage here; returns result.json."""

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
        return json.loads(out.result(stage).read_text())

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
