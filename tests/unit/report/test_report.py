"""Plan, summary and final table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlhf_app.config.load import load_config, parse_set
from rlhf_app.deployment.topology import Topology
from rlhf_app.errors import ConfigError
from rlhf_app.report.final_table import print_final_table
from rlhf_app.report.plan import batch_lines, changed_settings, model_lines
from rlhf_app.report.summary import collect_summary, write_summary
from rlhf_app.run_directory import RunDirectory

ROWS = {"train": 1500, "eval": 20, "dropped": {"too long": 3, "no answer": 1200, "odd": 0}}


def policy(*values: float) -> dict[str, float]:
    """What is reported of one policy."""
    names = ("gold", "reward", "kl_per_answer", "distinct_3", "answer_length", "eos_rate")
    return dict(zip(names, values, strict=True))


RESULTS: dict[str, dict[str, Any]] = {
    "sft": {
        "wall_seconds": 10.0,
        "startup_seconds": 2.0,
        "seconds": {"launch": 1.5, "data": 0.5, "training": 7.0, "saving": 1.0},
        "steps": 5,
        "eval_perplexity": {"before": 1234.5, "after": 2.25},
        "rows": ROWS,
        "samples": [],
    },
    "reward": {
        "wall_seconds": 20.0,
        "startup_seconds": 3.0,
        "seconds": {"launch": 3.0, "training": 16.5, "saving": 0.5},
        "steps": 6,
        "eval_accuracy": 0.875,
        "eval_margin": 0.5,
        "rows": ROWS,
    },
    "ppo": {
        "wall_seconds": 75.0,
        "startup_seconds": 4.0,
        "updates": 7,
        "policies": {
            "base": policy(0.125, -1.0, 9.5, 0.9, 16.0, 0.5),
            "sft": policy(0.25, 0.0, 0.0, 0.8, 12.0, 0.75),
            "ppo": policy(0.75, 1.5, 6.5, 0.7, 11.0, 1.0),
        },
        "rows": ROWS,
        "samples": [{"prompt": "why?", "base": "[/bold]", "sft": "dunno", "ppo": "because"}],
    },
}


def finished(path: Path, *stages: str) -> RunDirectory:
    run = RunDirectory(path)
    for stage in stages:
        result = path / stage / "result.json"
        result.parent.mkdir(parents=True)
        result.write_text(json.dumps(RESULTS[stage]))
    return run


def test_summary_has_the_documented_keys(tmp_path: Path) -> None:
    run = finished(tmp_path, "sft", "reward", "ppo")
    summary = write_summary(run)
    assert json.loads(run.summary.read_text()) == summary
    assert summary["stages"]["reward"] == {
        "wall_seconds": 20.0,
        "startup_seconds": 3.0,
        "seconds": {"launch": 3.0, "training": 16.5, "saving": 0.5},
        "artifact": str(tmp_path / "reward" / "model"),
        "rows": ROWS,
    }
    assert summary["total_wall_seconds"] == 105.0
    assert summary["sft"]["eval_perplexity"] == {"before": 1234.5, "after": 2.25}
    assert summary["reward"]["eval_accuracy"] == 0.875
    assert summary["ppo"]["gold"] == {"base": 0.125, "sft": 0.25, "ppo": 0.75}
    assert summary["ppo"]["kl_per_answer"] == 6.5
    assert summary["ppo"]["distinct_3"] == 0.7
    assert summary["ppo"]["answer_length"] == 11.0
    assert summary["ppo"]["policies"] == RESULTS["ppo"]["policies"]


def test_summary_of_some_stages(tmp_path: Path) -> None:
    summary = write_summary(finished(tmp_path, "sft"))
    assert set(summary) == {"stages", "sft", "total_wall_seconds"}


def test_where_the_time_goes(tmp_path: Path) -> None:
    """Rows by hand; a result of an earlier version has no parts, but counts in the total."""
    text = show(finished(tmp_path, "sft", "reward", "ppo"))
    lines = [line.split() for line in text.partition("Where the time goes")[2].splitlines()[3:]]
    rows = {" ".join(line[:-4]): line[-4:] for line in lines[:8]}
    assert rows["start-up: processes, imports"] == ["1.5", "3.0", "0.0", "4.5"]
    assert rows["start-up: data"] == ["0.5", "0.0", "0.0", "0.5"]
    assert rows["training"] == ["7.0", "16.5", "0.0", "23.5"]
    assert rows["total"] == ["10.0", "20.0", "75.0", "105.0"]
    assert rows["start-up"] == ["20%", "15%", "5%", "9%"]
    assert "start-up: models" not in rows


def test_results_of_another_version(tmp_path: Path) -> None:
    run = finished(tmp_path, "sft", "ppo")
    run.result("ppo").write_text('{"wall_seconds": 1.0, "startup_seconds": 0.5, "rows": {}}')
    with pytest.raises(ConfigError, match=r"ppo/result.json: .*another version.*--force"):
        write_summary(run)
    assert set(collect_summary(run, without=["ppo"])["stages"]) == {"sft"}


def show(run: RunDirectory) -> str:
    out = io.StringIO()
    print_final_table(Console(file=out, width=160), run, write_summary(run))
    return out.getvalue()


def test_final_table(tmp_path: Path) -> None:
    text = show(finished(tmp_path, "sft", "reward", "ppo"))
    for part in (
        "perplexity 1,234 -> 2.250",
        "accuracy 0.875",
        "gold 0.250 (sft) -> 0.750 (ppo)",
        "1m15s",
        "6.500",
        "because",
        "[/bold]",
        "sft, rows not used as they are: 3 too long; 1,200 no answer",
        str(tmp_path / "ppo" / "actor"),
        str(tmp_path / "summary.json"),
    ):
        assert part in text


def test_final_table_without_gold_or_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = {
        name: {key: value for key, value in numbers.items() if key != "gold"}
        for name, numbers in RESULTS["ppo"]["policies"].items()
    }
    monkeypatch.setitem(RESULTS, "ppo", RESULTS["ppo"] | {"policies": without})
    text = show(finished(tmp_path / "a", "ppo"))
    assert "gold " not in text
    assert "reward 0.000 (sft) -> 1.500 (ppo)" in text
    assert "Policies" not in show(finished(tmp_path / "b", "sft"))


def test_quality_of_the_reward_model_and_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = {
        "calibration": 0.0625,
        "accuracy_chosen_longer": 0.9375,
        "accuracy_chosen_shorter": None,
        "longer_wins": 0.875,
        "shorter_wins": 0.125,
        "score_length_correlation": -0.25,
    }
    kept = {"step": 3, "metric": "accuracy", "value": 0.875}
    monkeypatch.setitem(
        RESULTS, "reward", RESULTS["reward"] | {"evaluation": evaluation, "kept": kept}
    )
    run = finished(tmp_path, "sft", "reward")
    summary = write_summary(run)
    assert summary["reward"]["kept"] == kept
    assert summary["reward"]["evaluation"] == evaluation
    assert "kept" not in summary["sft"]
    text = show(run)
    assert "accuracy 0.875, kept: step 3 by accuracy" in text
    assert (
        "reward model: calibration error 0.062; accuracy 0.938 where the longer answer is chosen, "
        "- where the shorter answer is chosen (longer wins: 0.875, shorter wins: 0.125); "
        "correlation of score and length -0.250"
    ) in text


def test_a_number_that_one_policy_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all answers are equally long, there is no correlation with length."""
    policies = {
        name: numbers if name == "ppo" else numbers | {"reward_length_correlation": 0.375}
        for name, numbers in RESULTS["ppo"]["policies"].items()
    }
    monkeypatch.setitem(RESULTS, "ppo", RESULTS["ppo"] | {"policies": policies})
    text = show(finished(tmp_path, "ppo"))
    (row,) = (
        line.split()
        for line in text.splitlines()
        if line.split()[:1] == ["ppo"] and "6.500" in line
    )
    assert row == ["ppo", "0.750", "1.500", "-", "6.500", "0.700", "11.000", "1.000"]


def test_changed_settings_name_their_origin() -> None:
    resolved = load_config(overrides=[parse_set("model.actor=a/b"), parse_set("sft.epochs=2")])
    lines = changed_settings(resolved)
    assert "sft.epochs = 2.0  (--set)" in lines
    assert not any(line.startswith("reward.epochs") for line in lines)


def test_models_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sets = ["model.actor=facebook/opt-1.3b", "ppo.actor.zero_stage=2"]
    config = load_config(overrides=[parse_set(s) for s in sets]).config
    lines = model_lines(config, RunDirectory(Path("out")))
    # 331,196,416 of OPT-350M, and a head of 512 weights and a bias.
    assert [(line.stage, line.role, line.parameters, line.trained) for line in lines] == [
        ("sft", "model", "1,315,758,080", "ZeRO 0"),
        ("reward", "model", "331,196,929", "ZeRO 0"),
        ("ppo", "actor", "1,315,758,080", "ZeRO 2"),
        ("ppo", "critic", "331,196,929", "ZeRO 0"),
        ("ppo", "reference", "1,315,758,080", "frozen"),
        ("ppo", "reward", "331,196,929", "frozen"),
    ]
    lora = load_config(overrides=[parse_set(s) for s in [*sets, "lora.rank=8"]]).config
    assert [line.trained for line in model_lines(lora, RunDirectory(Path("out")))] == [
        "ZeRO 0, LoRA rank 8",
        "ZeRO 0, LoRA rank 8",
        "ZeRO 2, LoRA rank 8",
        "ZeRO 0, LoRA rank 8",
        "the actor's base",
        "the critic's base, if ids are shared",
    ]
    sets += ["lora.rank=8", "ppo.advantage_estimator=rloo", "ppo.answers_per_prompt=4"]
    without = load_config(overrides=[parse_set(s) for s in sets]).config
    lines = model_lines(without, RunDirectory(Path("out")))
    assert [(line.role, line.trained) for line in lines if line.stage == "ppo"] == [
        ("actor", "ZeRO 2, LoRA rank 8"),
        ("reference", "the actor's base"),
        ("reward", "frozen"),
    ]
    (line,) = [
        line for line in batch_lines(without, Topology("cpu", "cpu", 1)) if line.startswith("ppo:")
    ]
    assert line.startswith("ppo: 64 answers to 16 prompts an update = mini-batches 1 x")


def test_batches_of_a_plan() -> None:
    sets = ["model.actor=a/b", "ppo.mini_batches=2", "ppo.ppo_epochs=3"]
    config = load_config(overrides=[parse_set(s) for s in sets]).config
    lines = batch_lines(config, Topology("cpu", "cpu", 2))
    assert lines == [
        "sft: 32 sequences a step = micro-batch 8 x accumulation 2 x processes 2",
        "reward: 64 pairs a step = micro-batch 8 x accumulation 4 x processes 2",
        "ppo: 64 answers an update = mini-batches 2 x micro-batch 8 x accumulation 2 x "
        "processes 2; 6 optimizer step(s) an update",
    ]
    sets += ["sft.micro_batch_tokens=900", "ppo.micro_batch_tokens=4096", "stages=[sft,ppo]"]
    config = load_config(overrides=[parse_set(s) for s in sets]).config
    assert batch_lines(config, Topology("cpu", "cpu", 2)) == [
        "sft: 32 sequences a step, in micro-batches of at most 900 tokens on each of 2 process(es)",
        "ppo: 64 answers an update = mini-batches 2 x micro-batches of at most 4096 tokens x "
        "processes 2; 6 optimizer step(s) an update",
    ]


def test_what_looked_wrong_and_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{"update": 4, "kind": "length", "text": "answers run away [sic]"}]
    more = {"warnings": found, "stopped": "kl_per_answer 9.000 exceeds ppo.stop_kl 8"}
    monkeypatch.setitem(RESULTS, "ppo", RESULTS["ppo"] | more)
    run = finished(tmp_path, "ppo")
    (tmp_path / "ppo" / "actor_ema").mkdir()
    text = show(run)
    assert "ppo, update 4: answers run away [sic]" in text
    assert "ppo, ended after update 7: kl_per_answer 9.000 exceeds ppo.stop_kl 8" in text
    (line,) = (line for line in text.splitlines() if line.startswith("averaged actor "))
    assert line.endswith(str(tmp_path / "ppo" / "actor_ema"))
