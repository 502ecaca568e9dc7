"""`private`: nobody but the owner reads a run directory."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_app.config.load import load_config, parse_set
from rlhf_app.output_directory import open_output_directory
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training.files import atomic_write_json


@pytest.fixture(autouse=True)
def _usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, str]:
    paths = [directory, *(path for path in directory.rglob("*") if not path.is_symlink())]
    return {
        str(path.relative_to(directory)): f"{stat.S_IMODE(path.stat().st_mode):o}" for path in paths
    }


def write_as_workers_do(run: RunDirectory) -> None:
    run.logs("sft").mkdir(parents=True)
    code = f"import pathlib; pathlib.Path({str(run.log('sft', 0))!r}).write_text('line')"
    subprocess.run([sys.executable, "-c", code], check=True)
    atomic_write_json(run.result("sft"), {})


def test_off_unless_asked_and_asked_at_the_top() -> None:
    assert load_config().config.private is False
    assert load_config(overrides=[parse_set("private=true")]).config.private is True


@pytest.mark.parametrize(
    ("private", "directory", "file"), [(True, "700", "600"), (False, "755", "644")]
)
def test_everything_a_run_writes(tmp_path, private, directory, file):
    run = RunDirectory(tmp_path / "out")
    with open_output_directory(run, private=private):
        write_as_workers_do(run)
    assert modes(run.path) == {
        ".": directory,
        ".lock": file,
        "manifest.json": file,
        "sft": directory,
        "sft/logs": directory,
        "sft/logs/rank0.log": file,
        "sft/result.json": file,
    }
    after = tmp_path / "after"
    after.touch()
    assert modes(tmp_path)["after"] == "644", "the umask is as it was"


def test_what_an_earlier_run_left_is_closed_and_targets_of_links_are_left_alone(tmp_path):
    run = RunDirectory(tmp_path / "out")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    with open_output_directory(run):
        write_as_workers_do(run)
        (run.path / "directory").symlink_to(outside)
        (run.path / "file").symlink_to(outside / "file")
        (run.path / "broken").symlink_to(tmp_path / "nowhere")
    with open_output_directory(run, private=True):
        pass
    assert set(modes(run.path).values()) == {"700", "600"}
    assert modes(outside) == {".": "755", "file": "644"}
