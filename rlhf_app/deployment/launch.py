"""The exact command and environment of a stage's worker processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import rlhf_app
from rlhf_app.config.schema import JobName
from rlhf_app.deployment.child_process import LOG_TO_FILES
from rlhf_app.deployment.topology import Topology

WORKER_MODULE = "rlhf_app.commands.worker"


def worker_argv(topology: Topology, run_path: Path, stage: JobName) -> list[str]:
    """Command of one stage: the worker itself, or torchrun with N of them on this node.

    Args:
        topology: number of processes.
        run_path: the run directory.
        stage: the stage.
    """
    worker = ["-m", WORKER_MODULE, str(run_path), stage]
    if topology.num_processes == 1:
        return [sys.executable, *worker]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(topology.num_processes),
        *worker,
    ]


def worker_environment(topology: Topology, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of the workers: the controller's, and what they need on top.

    What the user exported wins where it is a matter of taste (threads, telemetry, tokenizers);
    hiding the GPUs from a CPU run and the log redirection are not.

    Args:
        topology: device and number of processes.
        base: the controller's environment.
    """
    env = dict(base)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    env.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // topology.num_processes)))
    env.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Forked data loaders after a parallel tokenizer would only print warnings.
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env["PYTHONUNBUFFERED"] = "1"
    env[LOG_TO_FILES] = "1"
    if topology.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        env["DS_ACCELERATOR"] = "cpu"
    # A launcher around us (Slurm, torchrun) must not leak its ranks into a fresh group.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    # Workers import the very code that runs here, installed or not.
    home = str(Path(rlhf_app.__file__).resolve().parent.parent)
    paths = [home, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return env
