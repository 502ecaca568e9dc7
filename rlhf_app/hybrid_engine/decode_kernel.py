"""Decode attention in one Triton kernel: one new token per row over the KV workspace.

Shapes: B rows, H query heads, K kv heads, G = H / K, D head size, L positions of a row.

One program serves one row, one kv head and one share of the row's positions, for all query
heads of that kv head, so that keys and values are read once (flash decoding, Dao et al. 2023).
Lengths come from the device: the launch does not depend on them, so that one captured launch
serves every step. The new key and value are stored on the way.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from rlhf_app.hybrid_engine import triton_modules

# Positions read at a time: in long rows more, with more warps, come closer to the bandwidth.
_BLOCK, _LONG_BLOCK = 64, 128
_LONG = 1024  # positions that a workspace has room for
# Programs that fill a GPU of this kind; fewer rows x heads are cut into shares of positions.
_PROGRAMS_PER_PROCESSOR = 2
_MOST_SHARES = 16
# Query heads per kv head are padded to the smallest matrix that tensor cores take.
_LEAST_ROWS = 16
_LARGEST_HEAD = 256


def _kernels() -> Any:
    return triton_modules.kernels("rlhf_app.hybrid_engine.triton_decode")


def available(device: torch.device, head_dim: int, value_dim: int) -> bool:
    """Whether the kernels serve heads of this size on this device."""
    return (
        device.type == "cuda"
        and head_dim == value_dim
        and head_dim <= _LARGEST_HEAD
        and _kernels() is not None
    )


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shares(rows: int, kv_heads: int, positions: int, device: torch.device) -> int:
    """Into how many parts a row's positions are cut, so that every processor has work."""
    wanted = _PROGRAMS_PER_PROCESSOR * _processors(device)
    most = min(_MOST_SHARES, -(-positions // (2 * _BLOCK)))
    count = 1
    while count < most and rows * kv_heads * count < wanted:
        count *= 2
    return min(count, max(most, 1))


def _warps(padded: int, long: bool) -> int:
    if padded > 64:
        return 4
    return 2 if long else 1


def decode_attention(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    biases_HL: torch.Tensor | None = None,
    rounded: bool = False,
    parts: int | None = None,
) -> torch.Tensor:
    """Store each row's new key and value, then attend over the row.

    Args:
        query: [B, H, 1, D].
        new_key: [B, K, 1, D].
        new_value: [B, K, 1, D].
        keys: [S, K, L, D] workspace of this layer.
        values: [S, K, L, D].
        slots_B: [B] int64, the workspace row of each row.
        lengths_B: [B] int64, tokens already stored; the new one goes to this position.
        scale: of the logits.
        window: keys a query sees, itself included; None is all.
        softcap: c in c*tanh(logits/c), or None.
        biases_HL: [H, L] fp32 with unit stride along L, added to the capped logits; or None.
        rounded: logits, bias included, are rounded to the query's dtype before the softmax.
        parts: shares of each row's positions; unset: by the size of the GPU.

    Returns:
        [B, H, 1, D] in the query's dtype, a view of [B, 1, H, D] memory.
    """
    rows, heads, _, size = query.shape
    kv_heads, positions = keys.shape[1], keys.shape[2]
    if parts is None:
        parts = shares(rows, kv_heads, positions, query.device)
    query, new_key, new_value = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, new_key, new_value)
    )
    out = torch.empty((rows, 1, heads, size), dtype=query.dtype, device=query.device)
    partial, extent = out, out
    if parts > 1:
        partial = query.new_empty((rows, heads, parts, size), dtype=torch.float32)
        extent = query.new_empty((rows, heads, parts, 2), dtype=torch.float32)
    group = heads // kv_heads
    kernels = _kernels()
    padded = max(16, 1 << (size - 1).bit_length())
    long = positions > _LONG and padded <= 64
    kernels.attend[(rows, kv_heads, parts)](
        query, new_key, new_value, keys, values, slots_B, lengths_B,
        lengths_B if biases_HL is None else biases_HL,
        out, partial, extent,
        query.stride(0), query.stride(1), new_key.stride(0), new_key.stride(1),
        new_value.stride(0), new_value.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2),
        0 if biases_HL is None else biases_HL.stride(0),
        scale, 0.0 if softcap is None else softcap, 0 if window is None else window,
        HEADS=heads, GROUP=group, SIZE=size,
        ROWS=max(_LEAST_ROWS, 1 << (group - 1).bit_length()), WIDTH=padded,
        BLOCK=_LONG_BLOCK if long else _BLOCK,
        PARTS=parts, CAPPED=softcap is not None, WINDOWED=window is not None,
        BIASED=biases_HL is not None, ROUNDED=rounded, EXACT=query.dtype == torch.float32,
        num_warps=_warps(padded, long), num_stages=2,
    )  # fmt: skip
    if parts > 1:
        kernels.combine[(rows, heads)](
            partial, extent, out, HEADS=heads, SIZE=size, WIDTH=padded, PARTS=parts,
            SPAN=1 << (parts - 1).bit_length(), num_warps=2,
        )  # fmt: skip
    return out.transpose(1, 2)


def store_prompts(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: slice | torch.Tensor,
) -> None:
    """Copy prompts' keys and values into their slots: one pass over them, whatever their layout.

    Args:
        key: [B, K, P, D], unit stride along D.
        value: [B, K, P, D].
        keys: [S, K, L, D] workspace of this layer.
        values: [S, K, L, D].
        slots: of each prompt; consecutive, or [B] int64.
    """
    rows, kv_heads, length, size = key.shape
    block = 64
    listed, first = (slots, 0) if isinstance(slots, torch.Tensor) else (None, slots.start)
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    _kernels().store_prompt[(rows, kv_heads, -(-length // block))](
        key, value, keys, values, keys if listed is None else listed, first, length,
        key.stride(0), key.stride(1), key.stride(2),
        value.stride(0), value.stride(1), value.stride(2),
        keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2),
        KEY_SIZE=size, VALUE_SIZE=value.shape[-1],
        WIDTH=1 << (max(size, value.shape[-1]) - 1).bit_length(), BLOCK=block,
        LISTED=listed is not None,
        num_warps=4,
    )  # fmt: skip
