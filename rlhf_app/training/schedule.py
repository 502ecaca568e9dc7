"""Learning rate as a share of its peak."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal


def lr_factor(
    schedule: Literal["cosine", "linear", "constant"], warmup_ratio: float, total_steps: int
) -> Callable[[int], float]:
    """Builds the function from optimizer steps done to the share of the peak rate.

    The warm-up climbs in equal parts and its last step has the full rate, so that no step
    is wasted at rate 0; cosine and linear then reach 0 when `total_steps` are done.

    Args:
        schedule: shape after the warm-up.
        warmup_ratio: share of the steps spent warming up, rounded up.
        total_steps: optimizer steps of the stage.
    """
    warmup = math.ceil(warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
