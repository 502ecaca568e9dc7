"""The states of this process's global random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Of Python, NumPy, torch on the CPU, and torch on this rank's GPU where there is one.

    Returns:
        Tensors and plain values, which a weights-only load reads back.
    """
    numpy = np.random.get_state(legacy=False)
    inner = numpy["state"]
    state = {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**inner, "key": torch.from_numpy(inner["key"].astype("i8"))}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Goes on from what `random_state` returned."""
    random.setstate(state["python"])
    inner = state["numpy"]["state"]
    np.random.set_state(
        {**state["numpy"], "state": {**inner, "key": inner["key"].numpy().astype("u4")}}
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
