"""Fixtures that several test packages share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
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


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunCli]:
    """Runs a worker script in one process or several, which fork from one that has imported all.

    `run(script, *arguments, ranks=1, env={}, cwd=None, timeout=240)` returns what
    `subprocess.run` would. See `rank_server.py` for what only torchrun shows.
    """
    server: subprocess.Popen[str] | None = None
    place = tmp_path_factory.mktemp("ranks")

    def run(
        script: Path | str, *arguments: object, ranks: int = 1,
        env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 240,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        nonlocal server
        ours = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if server is None or server.poll() is not None:
            server = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("rank_server.py"))],
                env=ours, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        command = [str(script), *map(str, arguments)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        said = {name: place / name for name in ("stdout", "stderr")}
        for file in said.values():
            file.write_text("")
        request = {
            "command": command, "ranks": ranks, "env": ours | dict(env or {}),
            "cwd": str(cwd or place), "port": port, "timeout": timeout,
            **{name: str(file) for name, file in said.items()},
        }  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = json.loads(server.stdout.readline())["returncode"]
        texts = [file.read_text(errors="replace") for file in said.values()]
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout, *texts)
        return subprocess.CompletedProcess(command, code, *texts)

    yield run
    if server is not None:
        server.stdin.close()
        server.wait(timeout=30)


def cli_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with the checkout importable; `extra` wins."""
    env = dict(os.environ) | {"COLUMNS": "200", "NO_COLOR": "1"} | dict(extra)
    paths = [str(ROOT), *filter(None, extra.get("PYTHONPATH", "").split(os.pathsep))]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return env
