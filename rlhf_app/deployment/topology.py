"""Turns the deployment settings into a number of processes on a kind of device."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from rlhf_app.config.schema import DeploymentConfig
from rlhf_app.errors import ConfigError

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Where a run's workers run.

    Attributes:
        type: the deployment type, `auto` resolved.
        device: what each worker computes on.
        num_processes: worker processes of a stage.
    """

    type: Literal["cpu", "single_gpu", "single_node"]
    device: Device
    num_processes: int


def count_gpus() -> int:
    """CUDA devices that a worker would see, without importing torch.

    Asks `nvidia-smi`; honours CUDA_VISIBLE_DEVICES; 0 where the installed torch is a CPU build.
    """
    if _torch_is_cpu_build():
        return 0
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run(  # noqa: S603 - a list of arguments, no shell
            [program, "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if listing.returncode != 0:
        return 0
    present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(bool(part.strip()) for part in visible.split(",")))


def _torch_is_cpu_build() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


def plan_topology(settings: DeploymentConfig, gpus: int) -> Topology:
    """Resolve `auto` and the number of processes for a plan; needs no GPU to be present.

    Args:
        settings: the deployment settings.
        gpus: devices here; 0 plans `single_node` for one process when none is asked for.
    """
    kind = settings.type
    if kind == "auto":
        kind = "single_gpu" if gpus > 0 else "cpu"
    if kind == "single_node":
        return Topology(kind, "cuda", settings.num_processes or max(1, gpus))
    if kind == "single_gpu":
        if settings.num_processes not in (None, 1):
            raise ConfigError(
                f"deployment.num_processes = {settings.num_processes}: single_gpu runs one "
                "process; use --deployment-type single_node"
            )
        return Topology(kind, "cuda", 1)
    return Topology(kind, "cpu", settings.num_processes or 1)


def check_topology(topology: Topology, gpus: int) -> None:
    """Refuse more GPU workers than there are GPUs.

    Raises:
        ConfigError: names the setting and the devices seen.
    """
    if topology.device != "cuda":
        return
    if gpus == 0:
        raise ConfigError(
            f"--deployment-type {topology.type}: no CUDA device is visible to this torch; use "
            "--deployment-type cpu, or install a CUDA build of torch"
        )
    if topology.num_processes > gpus:
        raise ConfigError(
            f"deployment.num_processes = {topology.num_processes}: only {gpus} GPU(s) are "
            "visible; ask for at most that many"
        )
