"""Each stage's data is looked at before the first stage starts, and no more of it than needed."""

import json

import pytest

from data_sources import source_identity, stage_check
from data_sources.stage_check import check_stage_data, is_all_small
from rlhf_app import stage_run
from rlhf_app.cli import run
from rlhf_app.config.schema import STAGES, RunConfig
from rlhf_app.errors import ConfigError


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answers(number):
    return [{"prompt": f"q{i}", "response": "a"} for i in range(number)]


def pairs(number):
    return [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(number)]


def config(**data):
    return RunConfig.model_validate({"data": data})


@pytest.fixture
def model(tmp_path):
    """All that is looked at before a stage starts."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2", "n_positions": 1024}')
    return str(tmp_path / "model")


@pytest.mark.parametrize("dry", [True, False])
def test_a_run_stops_before_the_stage_whose_successor_has_no_rows(
    tmp_path, monkeypatch, capsys, model, dry
):
    """Answers serve SFT; the reward model needs pairs."""
    monkeypatch.setattr(stage_run, "run_workers", lambda *_: pytest.fail("a stage was started"))
    data, out = written(tmp_path / "a.jsonl", answers(200)), tmp_path / "out"
    arguments = ["train", "--actor-model", model, "--data", data, "--output-dir", str(out)]
    arguments += ["--deployment-type", "cpu"]
    assert run([*arguments, *(["--dry-run"] if dry else [])]) == 2
    error = capsys.readouterr().err
    assert "stage reward has nothing to train on" in error
    assert error.count("\n") == 1
    assert not (out / "sft").exists()


def test_a_plan_says_what_each_stage_gets_or_that_data_was_not_opened(tmp_path, capsys, model):
    """The split is shared, and a file of its own is held out: 30 rows, and 4."""
    data = written(tmp_path / "p.jsonl", pairs(30))
    others = [{**row, "prompt": f"other {row['prompt']}"} for row in pairs(4)]
    held = written(tmp_path / "e.jsonl", others)
    flags = ["train", "--actor-model", model, "--eval-data", held, "--data-split", "shared"]
    flags += ["--dry-run", "--deployment-type", "cpu", "--output-dir", str(tmp_path / "out")]
    assert run([*flags, "--data", data]) == 0
    printed = capsys.readouterr().out
    for stage in STAGES:
        assert f"{stage}: 30 rows to train on, 4 to evaluate on" in printed
    assert run([*flags, "--data", "s3://bucket/a.jsonl"]) == 0
    assert "not opened" in capsys.readouterr().out


def test_of_a_large_source_the_first_rows_are_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(source_identity, "LARGE_BYTES", 1_000)
    monkeypatch.setattr(stage_check, "FIRST_ROWS", 60)
    path = written(tmp_path / "p.jsonl", pairs(300))
    run_config = config(sources=[path], split="shared", eval_fraction=0.5, cache_dir=str(tmp_path))
    assert not is_all_small(run_config, STAGES)
    for train, held in check_stage_data(run_config, STAGES).values():
        assert train + held == 60
    assert not (tmp_path / "records").exists()
    monkeypatch.setattr(source_identity, "LARGE_BYTES", 10**6)
    assert is_all_small(run_config, STAGES)
    assert {sum(rows) for rows in check_stage_data(run_config, STAGES).values()} == {300}


def test_where_they_are_not_enough_all_are_read_once_for_the_stages_too(tmp_path, monkeypatch):
    """Sixty questions come first: no pair is among the rows that are looked at."""
    monkeypatch.setattr(source_identity, "LARGE_BYTES", 1_000)
    monkeypatch.setattr(stage_check, "FIRST_ROWS", 60)
    lists = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(40)]
    blank = [{"prompt": f"q{i}", "chosen": "", "rejected": "b"} for i in range(60)]
    path = written(tmp_path / "p.jsonl", [*blank, *lists])
    settings = {"eval_fraction": 0.5, "max_bad_fraction": 0.7, "workers": 1}
    run_config = config(reward=[path], cache_dir=str(tmp_path / "cache"), **settings)
    assert sum(check_stage_data(run_config, ["reward"])["reward"]) == 40
    assert len(list((tmp_path / "cache" / "records").iterdir())) > 0
    with pytest.raises(ConfigError, match="60 of 100 rows are unusable"):
        check_stage_data(config(reward=[path], cache_dir=str(tmp_path / "cache")), ["reward"])


def test_a_stream_is_looked_at_as_far_as_its_stage_looks(tmp_path):
    path = written(tmp_path / "p.jsonl", [*answers(50), *pairs(100)])
    stream = {"streaming": True, "look_ahead": 50, "eval_fraction": 0.5}
    values = {"sft": {"max_steps": 1}, "reward": {"max_steps": 1}, "ppo": {"updates": 1}}
    found = RunConfig.model_validate(
        {"data": {"sft": [path], "reward": [path], **stream}, **values}
    )
    assert "sft" in check_stage_data(found, ["sft"])
    with pytest.raises(ConfigError, match="stage reward has nothing to train on"):
        check_stage_data(found, ["sft", "reward"])


def test_the_text_that_ppo_mixes_in_is_looked_at_too(tmp_path):
    path = written(tmp_path / "p.jsonl", pairs(60))
    text = written(tmp_path / "t.jsonl", pairs(2))
    data = {"data": {"ppo": [path], "eval": [text]}}
    found = RunConfig.model_validate({**data, "ppo": {"ptx_coef": 1.0, "ptx_data": [text]}})
    with pytest.raises(ConfigError, match=r"ppo\.ptx_data: no row is left"):
        check_stage_data(found, ["ppo"])
