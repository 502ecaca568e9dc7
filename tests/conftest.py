"""Fixtures that several test packages share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Real data, models and tokenizers that are not part of the project."""
    path = Path(os.environ.get("RLHF_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"no shared material in {path}: set RLHF_SHARED")
    return path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory for code that reads config.json only: it has no weights."""
    path = tmp_path / "base-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return path


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    """Preference rows, enough for three stages and their evaluation."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"question {i}", "chosen": "yes", "rejected": "no"} for i in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCli:
    """Runs `rlhf` in a process of its own, in an empty directory."""

    def run(
        *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rlhf_app", *arguments],
            cwd=tmp_path,
            env=cli_environment(env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


def cli_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with the checkout importable; `extra` wins."""
    env = dict(os.environ) | {"COLUMNS": "200", "NO_COLOR": "1"} | dict(extra)
    paths = [str(ROOT), *filter(None, extra.get("PYTHONPATH", "").split(os.pathsep))]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return env
