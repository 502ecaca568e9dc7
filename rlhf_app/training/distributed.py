"""The process group: one process or many, from the same entry point.

A launcher (torchrun, DeepSpeed, Slurm) sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Without them this is a group of one, which needs no port. Numbers and objects
travel over gloo on the host, so that exchanging them never waits for the GPU's queue;
tensors on the GPU travel over NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from rlhf_app.errors import ConfigError
from rlhf_app.training.clock import TIMEOUT_MINUTES
from rlhf_app.training.deepspeed_module import load_deepspeed

_DEFAULT_TIMEOUT_MINUTES = "30"


@dataclass(frozen=True)
class Dist:
    """This process's place among all of them.

    Attributes:
        rank: index among all processes.
        local_rank: index among the processes of this machine.
        world_size: number of processes.
        device: where this process computes.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums each number over all ranks, in fp64 on the host.

        Args:
            values: numbers, the same count on every rank.
        """
        if self.world_size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64)
        torch_dist.all_reduce(total)
        return total.tolist()

    def max(self, value: int) -> int:
        """The largest of all ranks' numbers."""
        return max(self.gather_objects(value))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.sum([float(flag)])[0] > 0

    def gather_objects(self, value: Any) -> list[Any]:
        """Collects one picklable object from each rank, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        torch_dist.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        """Waits until every rank has come here."""
        self.sum([0.0])


def setup() -> Dist:
    """Joins the process group and picks the device. Repeated calls return the same place.

    Raises:
        ConfigError: fewer GPUs on this machine than processes started on it.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # DeepSpeed looks for its launcher's variables even in a group of one.
    os.environ.setdefault("LOCAL_RANK", "0")
    device = _device(local_rank)
    if not torch_dist.is_initialized():
        minutes = os.environ.get(TIMEOUT_MINUTES, _DEFAULT_TIMEOUT_MINUTES)
        timeout = timedelta(minutes=float(minutes))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if world_size == 1:
            store = torch_dist.HashStore()  # type: ignore[attr-defined]
            torch_dist.init_process_group(
                backend, store=store, rank=0, world_size=1, timeout=timeout
            )
        else:
            torch_dist.init_process_group(
                backend, rank=rank, world_size=world_size, timeout=timeout
            )
        load_deepspeed().init_distributed(verbose=False)
    return Dist(rank, local_rank, world_size, device)


def close() -> None:
    """Leaves the process group. Safe to call twice, and needed on errors as well.

    A process that exits with a live gloo group may abort with "terminate called without an
    active exception", which hides the real error.
    """
    if torch_dist.is_initialized():
        # DeepSpeed's wrapper also drops the groups that it derived from the world.
        load_deepspeed().comm.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"process {local_rank} of this machine has no GPU: there are {count}; "
            f"set deployment.num_processes to {count}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
