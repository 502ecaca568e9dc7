"""Reads which keys a model's mask hides, from the function that transformers would build it of.

The mask is encoded as one number, the window that it stands for, so that it can travel
through the model in the place of the mask. Masks that no layer uses are never judged.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS


class Other(Enum):
    """A mask that is no causal band, or depends on more than positions."""

    OTHER = -1


OTHER: Literal[Other.OTHER] = Other.OTHER
_EVERYTHING = 0
_FAR = 1 << 40


def encode(*_: Any, mask_function: Any, **__: Any) -> torch.Tensor:
    """transformers' mask interface.

    Args:
        mask_function: (row, head, query position, key position) to whether it sees it.

    Returns:
        int64 scalar for `read`.
    """

    def sees(distance: int) -> bool:
        zero = torch.tensor(0)
        query, key = torch.tensor(_FAR), torch.tensor(_FAR - distance)
        return bool(mask_function(zero, zero, query, key))

    try:
        if sees(-1) or not sees(0):
            return torch.tensor(OTHER.value)
        low, high = 0, 1 << 32
        if sees(high):
            return torch.tensor(_EVERYTHING)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sees(middle) else (low, middle)
    except (IndexError, TypeError, RuntimeError):  # it looks something up that is not there
        return torch.tensor(OTHER.value)
    return torch.tensor(high)


def read(mask: torch.Tensor) -> int | Literal[Other.OTHER] | None:
    """The window that a mask stands for.

    Args:
        mask: made by `encode`.

    Returns:
        Keys that a far query sees, itself included; None when it sees all; `OTHER`.
    """
    value = int(mask.item())
    if value == OTHER.value:
        return OTHER
    return None if value == _EVERYTHING else value


def register(name: str) -> None:
    """Have transformers make its masks with `encode` under this attention name.

    Args:
        name: of a registered attention.
    """
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, encode)
