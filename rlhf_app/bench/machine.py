"""What the device can do, measured in this very run: read bandwidth and peak arithmetic rate."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rlhf_app.bench.limits import Machine

_GIB = 1 << 30
# Far beyond any cache.
_READ_BYTES = {"cuda": 4 * _GIB, "cpu": _GIB // 4}
_GEMM_SIZE = {"cuda": 8192, "cpu": 1024}
_ROUNDS = {"cuda": 8, "cpu": 10}
_REPEATS = {"cuda": 10, "cpu": 1}


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Reads a few GB with reduction kernels and multiplies large random matrices.

    The best round counts, and for reading the best kernel: a limit is what can be reached.

    Args:
        device: whose.
        dtype: of the matrices.
    """
    return Machine(_bandwidth(device), _peak(device, dtype))


def _bandwidth(device: torch.device) -> float:
    count = _READ_BYTES[device.type] // 4
    if device.type == "cuda":
        count = min(count, torch.cuda.mem_get_info(device)[0] // 16)
    data = torch.ones(count, device=device)
    readers: list[Callable[[], object]] = [data.sum, data.amax]
    if device.type == "cuda":
        readers += _triton_readers(data)
    seconds = min(_seconds(read, device) for read in readers)
    return data.nbytes / seconds


def _triton_readers(data: torch.Tensor) -> list[Callable[[], object]]:
    try:
        from rlhf_app.bench.triton_read import reader
    except ImportError:
        return []
    return [reader(data)]


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    size = _GEMM_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = _seconds(lambda: torch.mm(left, right, out=out), device)
    return 2 * size**3 / seconds


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one call, in the best of several rounds."""
    repeats = _REPEATS[device.type]
    run()
    best = float("inf")
    for _ in range(_ROUNDS[device.type]):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        best = min(best, (time.perf_counter() - began) / repeats)
    return best


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """In words, for the report."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
