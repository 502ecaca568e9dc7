"""The exact commands and environments of workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rlhf_app.config.schema import DeploymentConfig
from rlhf_app.deployment.launch import worker_argv, worker_environment
from rlhf_app.deployment.topology import Topology, check_topology, plan_topology
from rlhf_app.errors import ConfigError

ONE_CPU = Topology("cpu", "cpu", 1)
TWO_CPUS = Topology("cpu", "cpu", 2)
EIGHT_GPUS = Topology("single_node", "cuda", 8)


def test_one_process_is_the_worker_itself() -> None:
    assert worker_argv(ONE_CPU, Path("out dir"), "sft") == [
        sys.executable,
        "-m",
        "rlhf_app.commands.worker",
        "out dir",
        "sft",
    ]


def test_several_processes_are_started_by_torchrun() -> None:
    assert worker_argv(EIGHT_GPUS, Path("/runs/a"), "ppo") == [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "8",
        "-m",
        "rlhf_app.commands.worker",
        "/runs/a",
        "ppo",
    ]


def test_environment_of_a_cpu_run(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    base = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1", "RANK": "3", "MASTER_PORT": "1"}
    env = worker_environment(TWO_CPUS, base)
    assert env == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "3",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "RLHF_LOG_TO_FILES": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(repo_root),
    }
    assert base["RANK"] == "3"


def test_what_the_user_exported_stays() -> None:
    base = {
        "OMP_NUM_THREADS": "5",
        "CUDA_VISIBLE_DEVICES": "2",
        "PYTHONPATH": f"/a{os.pathsep}/b",
        "HF_TOKEN": "x",
    }
    env = worker_environment(Topology("single_gpu", "cuda", 1), base)
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("5", "2")
    assert env["PYTHONPATH"].split(os.pathsep)[1:] == ["/a", "/b"]
    assert env["HF_TOKEN"] == "x"
    assert "DS_ACCELERATOR" not in env


@pytest.mark.parametrize(
    ("kind", "processes", "gpus", "expected"),
    [
        ("auto", None, 0, ONE_CPU),
        ("auto", 2, 0, TWO_CPUS),
        ("auto", None, 4, Topology("single_gpu", "cuda", 1)),
        ("cpu", 2, 4, TWO_CPUS),
        ("single_gpu", None, 0, Topology("single_gpu", "cuda", 1)),
        ("single_node", None, 8, EIGHT_GPUS),
        ("single_node", 2, 8, Topology("single_node", "cuda", 2)),
        ("single_node", None, 0, Topology("single_node", "cuda", 1)),
    ],
)
def test_topology(kind: str, processes: int | None, gpus: int, expected: Topology) -> None:
    settings = DeploymentConfig.model_validate({"type": kind, "num_processes": processes})
    assert plan_topology(settings, gpus) == expected


def test_single_gpu_is_one_process() -> None:
    settings = DeploymentConfig(type="single_gpu", num_processes=2)
    with pytest.raises(ConfigError, match="use --deployment-type single_node"):
        plan_topology(settings, 2)


@pytest.mark.parametrize(
    ("topology", "gpus", "message"),
    [
        (Topology("single_gpu", "cuda", 1), 0, "no CUDA device is visible"),
        (EIGHT_GPUS, 4, r"deployment.num_processes = 8: only 4 GPU\(s\) are visible"),
    ],
)
def test_missing_gpus(topology: Topology, gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_topology(topology, gpus)


def test_enough_devices_pass() -> None:
    check_topology(EIGHT_GPUS, 8)
    check_topology(TWO_CPUS, 0)
