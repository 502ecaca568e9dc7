"""Help is instant, imports no torch, and its flags change only on purpose."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import rlhf_app
from rlhf_app.cli import app

_PROBE = """
import sys
from rlhf_app.cli import run
code = run(sys.argv[1:])
heavy = sorted({"torch", "transformers", "deepspeed", "datasets", "numpy"} & set(sys.modules))
print("HEAVY", heavy, "CODE", code)
"""

COMMON = {
    "--actor-model",
    "--reward-model",
    "--reward-source",
    "--actor-zero-stage",
    "--reward-zero-stage",
    "--lora-rank",
    "--data",
    "--data-split",
    "--sft-data",
    "--reward-data",
    "--ppo-data",
    "--eval-data",
    "--gold",
    "--deployment-type",
    "--output-dir",
    "--resume",
    "--seed",
    "--force",
    "--dry-run",
    "--debug",
    "--config",
    "--preset",
    "--set",
}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["ppo", "-h"],
        ["--version"],
        ["data", "--help"],
        ["data", "stats", "--help"],
        ["data", "inspect", "--help"],
        ["data", "cache", "--help"],
        ["verify", "--help"],
        ["bench", "--help"],
        ["bench", "generate", "--help"],
        ["bench", "ppo", "--help"],
    ],
)
def test_help_imports_nothing_heavy(repo_root: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *arguments],
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "HEAVY [] CODE 0"


def test_help_takes_less_than_a_second(repo_root: Path) -> None:
    """Of processor time: what it takes on a machine that does nothing else."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "rlhf_app", "--help"],
        cwd=repo_root,
        capture_output=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_version(repo_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_app", "--version"],
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"rlhf {rlhf_app.__version__}\n"


def test_flags_are_the_agreed_ones() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: {option for parameter in commands[name].params for option in parameter.opts}
        for name in ("train", "sft", "reward", "ppo")
    }
    assert found["train"] == COMMON | {"--step", "--stages"}
    for stage in ("sft", "reward", "ppo"):
        assert found[stage] == COMMON
