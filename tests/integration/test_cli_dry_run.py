"""`--dry-run` plans without torch, network, GPU or data, and changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

_WITHOUT_TORCH_AND_NETWORK = """
import socket, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "deepspeed", "datasets"):
            raise ImportError(name + " is forbidden here")

sys.meta_path.insert(0, Refuse())

def refuse(*args, **kwargs):
    raise OSError("no network")

socket.socket.connect = refuse
from rlhf_app.cli import run
raise SystemExit(run(sys.argv[1:]))
"""


def test_opt_1_3b_on_one_gpu(tmp_path: Path, run_cli: Run, repo_root: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _WITHOUT_TORCH_AND_NETWORK,
            *("train", "--actor-model", "facebook/opt-1.3b", "--deployment-type", "single_gpu"),
            *("--step", "1", "2", "3", "--reward-zero-stage", "2", "--dry-run"),
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(repo_root), "COLUMNS": "200", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout
    for part in (
        "model.actor = facebook/opt-1.3b  (--actor-model)",
        "ppo.critic.zero_stage = 2  (--reward-zero-stage)",
        "sft.batch_size = 128  (preset single_gpu)",
        "1,315,758,080",
        "331,196,929",
        "bf16, 1 process on cuda",
        f"sft: {sys.executable} -m rlhf_app.commands.worker output sft",
        f"ppo: {sys.executable} -m rlhf_app.commands.worker output ppo",
        "log_ratio_clamp: 20.0",
    ):
        assert part in out
    assert list(tmp_path.iterdir()) == []


def test_single_node_prints_torchrun(run_cli: Run) -> None:
    done = run_cli(
        *("train", "--actor-model", "facebook/opt-1.3b", "--deployment-type", "single_node"),
        *("--set", "deployment.num_processes=8", "--stages", "sft", "--dry-run"),
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"sft: {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 8 "
        "-m rlhf_app.commands.worker output sft"
    ) in done.stdout


def test_embedded_default(run_cli: Run, tmp_path: Path) -> None:
    done = run_cli("train", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "(preset tiny_cpu)" in done.stdout
    assert list(tmp_path.iterdir()) == []


BAD = [
    (["train", "--actor-model", "./none"], "--actor-model ./none: no such directory"),
    (["train", "--set", "sft.batch_sise=8"], "did you mean sft.batch_size?"),
    (["train", "--set", "ppo.top_p=0.9"], "rollouts sample from the whole distribution"),
    (["train", "--set", "ppo.repetition_penalty=2"], "have no such setting (docs/ppo_details.md"),
    (["train", "--set", "sft.batch_size=33"], "is not divisible by"),
    (["train", "--config", "none.yaml"], "none.yaml: no such configuration file"),
    (["train", "--preset", "none"], "--preset none: unknown"),
    (["train", "--step", "4"], "--step 4: '4' is no stage"),
    (["train", "--gold", "nocolon"], "--gold nocolon: expected module:function"),
    (
        ["train", "--set", "ppo.ptx_data=[no.jsonl]", "--set", "ppo.ptx_coef=1", "--dry-run"],
        "ppo.ptx_data no.jsonl: no such file or directory",
    ),
    (["train", "--reward-model", "./none", "--dry-run"], "--reward-model ./none: no such"),
    (["train", "--data", "x.jsonl"], "name the base model with --actor-model"),
    (["ppo", "--actor-model", "a/b"], "PPO needs a reward model"),
    (["train", "--actor-zero-stage", "7"], "(from --actor-zero-stage): expected 0, 1, 2 or 3"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_exit_2(
    run_cli: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run_cli(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("rlhf: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert "Traceback" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_debug_adds_the_traceback(run_cli: Run) -> None:
    done = run_cli("train", "--actor-model", "./none", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("rlhf: error: --actor-model ./none")
