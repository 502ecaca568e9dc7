"""Memory of this process: exact on CUDA, the resident set on the CPU."""

from __future__ import annotations

import resource

import psutil
import torch


def reset_peak(device: torch.device) -> None:
    """Count the peak anew, where that is possible: on CUDA."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def memory_use(device: torch.device) -> tuple[int, int]:
    """Bytes now, and the most since the last `reset_peak`.

    Returns:
        On CUDA what tensors hold; on the CPU the process's resident memory, and the most of it
        since the process started.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    now = int(psutil.Process().memory_info().rss)
    # The kernel counts the peak in batches: it may lag behind.
    return now, max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
