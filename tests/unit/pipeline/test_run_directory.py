"""Paths of a run, models of its stages, and who may use the directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_app.config.load import load_config, parse_set
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.fingerprint import WHOLE_FILE_LIMIT, content_hash, file_hash
from rlhf_app.output_directory import check_output_directory, open_output_directory
from rlhf_app.run_directory import RunDirectory
from rlhf_app.stage_inputs import stage_inputs

RUN = RunDirectory(Path("out"))


def configure(*sets: str) -> RunConfig:
    return load_config(overrides=[parse_set(s) for s in sets]).config


def test_layout() -> None:
    paths = [
        RUN.config,
        RUN.manifest,
        RUN.summary,
        RUN.embedded,
        RUN.artifact("sft"),
        RUN.artifact("reward"),
        RUN.artifact("ppo"),
        RUN.critic,
        RUN.metrics("sft"),
        RUN.result("reward"),
        RUN.log("ppo", 3),
        RUN.error("ppo", 1),
    ]
    assert [str(path) for path in paths] == [
        "out/config.yaml",
        "out/manifest.json",
        "out/summary.json",
        "out/embedded",
        "out/sft/model",
        "out/reward/model",
        "out/ppo/actor",
        "out/ppo/critic",
        "out/sft/metrics.jsonl",
        "out/reward/result.json",
        "out/ppo/logs/rank3.log",
        "out/ppo/error_rank1.json",
    ]


@pytest.mark.parametrize(
    ("sets", "stage", "expected"),
    [
        (["model.actor=a/b"], "sft", {"model": "a/b"}),
        (["model.actor=a/b"], "reward", {"model": "out/sft/model"}),
        (["model.actor=a/b", "stages=[reward]"], "reward", {"model": "a/b"}),
        (["model.actor=a/b", "model.reward=c/d"], "reward", {"model": "c/d"}),
        (["model.actor=facebook/opt-1.3b"], "reward", {"model": "facebook/opt-350m"}),
        (["model.actor=./facebook/opt-1.3b"], "reward", {"model": "out/sft/model"}),
        (
            ["model.actor=a/b", "model.reward=c/d"],
            "ppo",
            {"actor": "out/sft/model", "reward": "out/reward/model", "base": "a/b"},
        ),
        (
            ["model.actor=a/b", "model.reward=c/d", "stages=[ppo]"],
            "ppo",
            {"actor": "a/b", "reward": "c/d", "base": "a/b"},
        ),
        (
            ["model.actor=a/b", "stages=[sft,ppo]", "ppo.rewards='m:f'"],
            "ppo",
            {"actor": "out/sft/model", "base": "a/b"},
        ),
        # There is one, but it scores nothing.
        (
            ["model.actor=a/b", "model.reward=c/d", "stages=[ppo]", "ppo.rewards=[e/f]"],
            "ppo",
            {"actor": "a/b", "base": "a/b"},
        ),
    ],
)
def test_stage_inputs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sets: list[str],
    stage: str,
    expected: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert stage_inputs(configure(*sets), RUN, stage) == expected  # type: ignore[arg-type]


def test_finished_stages_of_earlier_runs_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for stage in ("sft", "reward"):
        RUN.stage(stage).mkdir(parents=True)
        RUN.result(stage).write_text("{}")
    config = configure("model.actor=a/b", "stages=[ppo]")
    assert stage_inputs(config, RUN, "ppo") == {
        "actor": "out/sft/model",
        "reward": "out/reward/model",
        "base": "a/b",
    }


def test_unset_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="--actor-model"):
        stage_inputs(configure(), RUN, "sft")


def test_output_directory_must_be_ours_or_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is a file"):
        check_output_directory(RunDirectory(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"is not empty and has no manifest\.json"):
        check_output_directory(RunDirectory(tmp_path / "full"))
    check_output_directory(RunDirectory(tmp_path / "empty"))
    check_output_directory(RunDirectory(tmp_path / "new" / "deep"))
    assert not (tmp_path / "new").exists()


def test_open_creates_reopens_and_locks(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "new" / "deep")
    with open_output_directory(run) as manifest:
        assert manifest.stages == {}
        assert run.manifest.is_file()
        with pytest.raises(ConfigError, match="another rlhf is running there"):
            open_output_directory(run).__enter__()
    with open_output_directory(run):
        pass


def test_unwritable_output_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # A path below a file fails for root too, whom permissions do not stop.
    with (
        pytest.raises(ConfigError, match="cannot be written: Not a directory"),
        open_output_directory(RunDirectory(tmp_path / "file" / "out")),
    ):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_parent(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with (
            pytest.raises(ConfigError, match="cannot be written: Permission denied"),
            open_output_directory(RunDirectory(tmp_path / "out")),
        ):
            pass
    finally:
        tmp_path.chmod(0o755)


def test_hashes_tell_contents_and_names(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (one, two):
        directory.mkdir()
        (directory / "a").write_text("x")
    assert content_hash(str(one)) == content_hash(str(two))
    (two / "a").rename(two / "b")
    assert content_hash(str(one)) != content_hash(str(two))
    assert content_hash("org/name") == "hub:org/name"
    # SHA-256 of the letter x, from any other implementation.
    assert file_hash(one / "a") == (
        "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    )


def test_large_files_are_sampled_to_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(WHOLE_FILE_LIMIT + 1)  # sparse: takes no disk
    before = file_hash(path)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"1")
    assert file_hash(path) != before
