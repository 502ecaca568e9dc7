"""The KV workspace: keys and values of every row being decoded, allocated once and reused.

Shapes: S slots (rows that can be decoded at once), K kv heads, T positions, D head size.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_app.hybrid_engine.upload import upload


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token.

    Attributes:
        kv_heads: key/value heads (fewer than query heads under GQA).
        key_dim: size of one key.
        value_dim: size of one value.
    """

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Numbers stored per token and layer."""
        return self.kv_heads * (self.key_dim + self.value_dim)


# Lengths are rounded up to this, so that rollouts of similar length reuse one workspace.
_POSITION_MULTIPLE = 16


def rounded(positions: int) -> int:
    """Positions to borrow for rows of this length."""
    return -(-positions // _POSITION_MULTIPLE) * _POSITION_MULTIPLE


def free_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that can still be allocated, torch's own reserve included."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class KVWorkspace:
    """Preallocated keys and values, borrowed for a rollout and given back after it.

    Layers of one shape share one allocation, so that moving a row to another slot is one
    copy for all of them. Writing past the end is an IndexError, on every device.

    Args:
        shapes: one per layer, in layer order.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shapes = tuple(shapes)
        self._dtype = dtype
        self._device = device
        self._groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.slots = 0
        self.positions = 0
        #: The most bytes held so far.
        self.peak_bytes = 0

    def bytes_for(self, slots: int, positions: int) -> int:
        """Bytes that a workspace of this size takes."""
        per_token = sum(shape.elements for shape in self._shapes)
        return slots * positions * per_token * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self.bytes_for(self.slots, self.positions)

    @property
    def made_for(self) -> tuple[torch.dtype, torch.device]:
        """What its keys and values are, and where."""
        return self._dtype, self._device

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the allocations are: a captured decode step reads and writes there."""
        return tuple(buffer.data_ptr() for group in self._groups for buffer in group)

    def borrow(self, slots: int, positions: int) -> None:
        """Make room for `slots` rows of `positions` tokens, all zero.

        A workspace that is large enough is kept, addresses included.

        Args:
            slots: rows decoded at once.
            positions: most tokens of a row, prompt and answer.

        Raises:
            RuntimeError: the memory is not there, even after other memory was collected.
        """
        if slots > self.slots or positions > self.positions:
            # Never shrink one side while growing the other: sizes settle after a few rollouts.
            slots, positions = max(slots, self.slots), max(positions, self.positions)
            self.release()
            try:
                self._allocate(slots, positions)
            except (torch.OutOfMemoryError, RuntimeError):
                self.release()
                self._collect()
                try:
                    self._allocate(slots, positions)
                except (torch.OutOfMemoryError, RuntimeError) as error:
                    self.release()
                    raise RuntimeError(self._no_room(slots, positions)) from error
        else:
            # A masked position still meets its value times zero: NaN left there would spread.
            for keys, values in self._groups:
                keys.zero_()
                values.zero_()

    def release(self) -> None:
        """Give the memory back."""
        self._groups = []
        self.keys = []
        self.values = []
        self.slots = 0
        self.positions = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int], positions: int) -> None:
        """Copy the first `positions` tokens of slots `sources` over slots `targets`."""
        self.check(max((*sources, *targets)) + 1, positions)
        source, target = upload([sources, targets], self._device)
        for group in self._groups:
            for buffer in group:
                live = buffer[:, :, :, :positions]
                live[:, target] = live[:, source]

    def check(self, slots: int, positions: int) -> None:
        """Refuse a size beyond the workspace.

        Raises:
            IndexError: naming what was asked for and what is there.
        """
        if slots > self.slots or positions > self.positions:
            raise IndexError(
                f"KV workspace holds {self.slots} rows of {self.positions} tokens; "
                f"{slots} rows of {positions} were asked for"
            )

    def _allocate(self, slots: int, positions: int) -> None:
        indices: dict[LayerShape, list[int]] = {}
        for index, shape in enumerate(self._shapes):
            indices.setdefault(shape, []).append(index)
        keys: dict[int, torch.Tensor] = {}
        values: dict[int, torch.Tensor] = {}
        for shape, layers in indices.items():
            size = (len(layers), slots, shape.kv_heads, positions)
            key_buffer = self._zeros((*size, shape.key_dim))
            value_buffer = self._zeros((*size, shape.value_dim))
            self._groups.append((key_buffer, value_buffer))
            keys.update(zip(layers, key_buffer, strict=True))
            values.update(zip(layers, value_buffer, strict=True))
        self.keys = [keys[i] for i in range(len(self._shapes))]
        self.values = [values[i] for i in range(len(self._shapes))]
        self.slots = slots
        self.positions = positions
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def _zeros(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(size, dtype=self._dtype, device=self._device)

    def _collect(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _no_room(self, slots: int, positions: int) -> str:
        wanted = self.bytes_for(slots, positions)
        free = "unknown"
        if self._device.type == "cuda":
            free = str(free_bytes(self._device))
        return (
            f"KV workspace for {slots} rows of {positions} tokens needs {wanted} bytes, "
            f"free on {self._device}: {free} bytes; lower the rollout batch, max_slots or "
            "the prompt and answer lengths"
        )
