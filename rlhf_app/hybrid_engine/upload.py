"""Small tables from the host to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def upload(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """A tensor of whole numbers on the device.

    A copy from ordinary host memory waits until the device has done all that it was given
    before; one from pinned memory is only one more thing to do.

    Args:
        values: numbers, or rows of them.
        device: where the tensor goes.

    Returns:
        int64, of the shape of `values`.
    """
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
