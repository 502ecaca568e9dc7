"""Decode attention on the CPU by a compiled kernel: one new token per row over the KV workspace.

Shapes: B rows, H query heads, K kv heads, D head size, L positions.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from rlhf_app.hybrid_engine.attention import AttentionCall
from rlhf_app.hybrid_engine.fused.compiled import shared_out
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace

_FLOAT, _LONG = 4, 8  # bytes


@dataclass(slots=True)
class CpuDecode:
    """One new token for each row, in whatever slot it is; fp32.

    Attributes:
        kernels: from `fused.compiled.load`.
        workspace: where keys and values are.
        slots_B: [B] int64 contiguous, slot of each row.
        lengths_B: [B] int64 contiguous, tokens already stored.
    """

    kernels: ctypes.CDLL
    workspace: KVWorkspace
    slots_B: torch.Tensor
    lengths_B: torch.Tensor

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the new key and value, then attend over the row so far.

        Raises:
            IndexError: a row is longer than the workspace.
        """
        keys, values = self.workspace.keys[call.layer], self.workspace.values[call.layer]
        query, key, value = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (call.query, call.key, call.value)
        )
        rows, heads, _, size = query.shape
        kv_heads, positions = keys.shape[1], keys.shape[2]
        out = torch.empty((rows, 1, heads, size), dtype=query.dtype)
        biases = None
        if call.alibi is not None:
            biases = call.alibi.table(positions)
        start_q, start_k, start_v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        strides_q, strides_k, strides_v = query.stride(), key.stride(), value.stride()
        lengths = self.lengths_B.data_ptr()
        slots, start_out = self.slots_B.data_ptr(), out.data_ptr()

        def run(first: int, count: int) -> int:
            beyond: int = self.kernels.decode_attention(
                start_q + first * strides_q[0] * _FLOAT, strides_q[0], strides_q[1],
                start_k + first * strides_k[0] * _FLOAT, strides_k[0], strides_k[1],
                start_v + first * strides_v[0] * _FLOAT, strides_v[0], strides_v[1],
                keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1),
                values.stride(0), values.stride(1),
                slots + first * _LONG, lengths + first * _LONG,
                start_out + first * heads * size * _FLOAT, count, heads, kv_heads, positions,
                size, call.scale, call.window or 0, call.softcap or 0.0,
                None if biases is None else biases.data_ptr(),
                0 if biases is None else biases.stride(0),
            )  # fmt: skip
            return beyond

        if any(row >= 0 for row in shared_out(run, rows, 2 * rows * heads * size * positions)):
            raise IndexError(
                f"a row of {int(self.lengths_B.max()) + 1} tokens is beyond the KV workspace, "
                f"which has {positions} positions"
            )
        return out.transpose(1, 2)
