"""Where a module's weights are: the proof that there is one copy, and that it stayed in place."""

from __future__ import annotations

from typing import Any

from torch import nn


class WeightPlaces:
    """Addresses of all parameters, and under ZeRO-3 whether they are split over the ranks.

    Args:
        module: the module that is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters: dict[str, Any] = dict(module.named_parameters())
        self.note()

    def note(self) -> None:
        """Take the present state for the one that must hold."""
        self._noted = {name: _place(p) for name, p in self._parameters.items()}

    def problems(self) -> list[str]:
        """One line for all parameters that are no longer as noted; empty: all are."""
        changed = [name for name, p in self._parameters.items() if _place(p) != self._noted[name]]
        if not changed:
            return []
        return [
            f"{len(changed)} of {len(self._parameters)} parameters moved, or are whole where they "
            f"were split ({changed[0]}, ...)"
        ]

    def __str__(self) -> str:
        count = len(self._parameters)
        split = sum(_is_split(p) for p in self._parameters.values())
        if split:
            return f"{split} of {count} parameters split over the ranks, as before"
        return f"{count} parameters, all at their address"


def _is_split(parameter: Any) -> bool:
    # By name: importing DeepSpeed's enum would import DeepSpeed.
    return hasattr(parameter, "ds_status") and parameter.ds_status.name == "NOT_AVAILABLE"


def _place(parameter: Any) -> tuple[bool, int]:
    """Whether the weight is split, and where it is: this rank's part of it where it has one."""
    part = getattr(parameter, "ds_tensor", None)
    # A whole weight of ZeRO-3 is DeepSpeed's to free at any time: its address says nothing.
    return _is_split(parameter), (parameter if part is None else part).data_ptr()
