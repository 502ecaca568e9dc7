"""Copies from the host that do not make it wait for the device."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Puts a host tensor onto the device, in the order of its queue.

    From ordinary memory a copy to CUDA waits until the device has done all work before it.
    Pinned memory does not; torch keeps it for the next copy when this one has been done.

    Args:
        tensor: on the host.
        device: where to.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
