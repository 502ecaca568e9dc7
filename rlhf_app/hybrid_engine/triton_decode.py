"""The Triton kernels behind `decode_kernel`; imported only where Triton is present.

Layouts are those of `decode_kernel.decode_attention`. Reductions run in fp32. Only
compile-time arguments are annotated: Triton reads annotations as such.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend_block(
    q, key_base, value_base, biases, best, total, mixed, start, stop, head,
    k_pos, v_pos, bias_head, scale, softcap, query,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr,
    ROUNDED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Takes stored positions `start` .. min(start + BLOCK, stop) into the running softmax.

    WHOLE: the block is known to end before `stop`. Loads without a mask go to shared memory
    behind the arithmetic of the block before.
    """
    member = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    position = start + tl.arange(0, BLOCK)
    k_at = key_base + position[:, None] * k_pos + dim[None, :]
    v_at = value_base + position[:, None] * v_pos + dim[None, :]
    if WHOLE and SIZE == WIDTH:
        k = tl.load(k_at)
        v = tl.load(v_at)
    else:
        there = (position < stop)[:, None] & (dim < SIZE)[None, :]
        k = tl.load(k_at, mask=there, other=0.0)
        v = tl.load(v_at, mask=there, other=0.0)
    if EXACT:
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        logits = tl.dot(q, tl.trans(k)) * scale
    if CAPPED:
        # tanh(x) = 2 sigmoid(2x) - 1
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    if BIASED:
        place = biases + head[:, None] * bias_head + position[None, :]
        inside = (member < GROUP)[:, None] & (position < stop)[None, :]
        logits += tl.load(place, mask=inside, other=0.0)
    if ROUNDED:
        logits = logits.to(query.dtype.element_ty).to(tl.float32)
    if not WHOLE:
        logits = tl.where((position < stop)[None, :], logits, float("-inf"))
    higher = tl.maximum(best, tl.max(logits, 1))
    weight = tl.exp(logits - higher[:, None])
    fade = tl.exp(best - higher)
    if EXACT:
        mixed = mixed * fade[:, None] + tl.dot(weight, v, input_precision="ieee")
    else:
        mixed = tl.dot(weight.to(v.dtype), v, mixed * fade[:, None])
    return higher, total * fade + tl.sum(weight, 1), mixed


@triton.jit
def attend(
    query, new_key, new_value, keys, values, slots, lengths,
    biases, out, partial, extent,
    q_row, q_head, nk_row, nk_head, nv_row, nv_head,
    k_slot, k_head, k_pos, v_slot, v_head, v_pos,
    bias_head, scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, BIASED: tl.constexpr, ROUNDED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One row, one kv head, one part of the positions: an online softmax (Milakov 2018)."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    slot = tl.load(slots + row)

    member = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    real = dim < SIZE
    head = kv_head * GROUP + member
    own = (member < GROUP)[:, None] & real[None, :]
    q = tl.load(query + row * q_row + head[:, None] * q_head + dim[None, :], mask=own, other=0.0)
    key_base = keys + slot * k_slot + kv_head * k_head
    value_base = values + slot * v_slot + kv_head * v_head

    # The new token counts as position `length`; it is never read back from the workspace.
    end = length + 1
    first = length * 0
    if WINDOWED:
        first = tl.maximum(end - window, 0)
    share = tl.cdiv(tl.cdiv(end - first, BLOCK), PARTS) * BLOCK
    low = first + part * share
    stop = tl.minimum(low + share, length)
    whole = low + tl.maximum(stop - low, 0) // BLOCK * BLOCK

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(low, whole, BLOCK):
        best, total, mixed = _attend_block(
            q, key_base, value_base, biases, best, total, mixed, start, stop, head,
            k_pos, v_pos, bias_head, scale, softcap, query,
            GROUP, SIZE, ROWS, WIDTH, BLOCK, True, CAPPED, BIASED, ROUNDED, EXACT,
        )  # fmt: skip
    if whole < stop:
        best, total, mixed = _attend_block(
            q, key_base, value_base, biases, best, total, mixed, whole, stop, head,
            k_pos, v_pos, bias_head, scale, softcap, query,
            GROUP, SIZE, ROWS, WIDTH, BLOCK, False, CAPPED, BIASED, ROUNDED, EXACT,
        )  # fmt: skip
    if (low < end) & (low + share >= end):
        k_new = tl.load(new_key + row * nk_row + kv_head * nk_head + dim, mask=real, other=0.0)
        v_new = tl.load(new_value + row * nv_row + kv_head * nv_head + dim, mask=real, other=0.0)
        tl.store(key_base + length * k_pos + dim, k_new, mask=real)
        tl.store(value_base + length * v_pos + dim, v_new, mask=real)
        logit = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
        if CAPPED:
            logit = softcap * (2.0 * tl.sigmoid(2.0 * logit / softcap) - 1.0)
        if BIASED:
            logit += tl.load(biases + head * bias_head + length, mask=member < GROUP, other=0.0)
        if ROUNDED:
            logit = logit.to(query.dtype.element_ty).to(tl.float32)
        higher = tl.maximum(best, logit)
        weight = tl.exp(logit - higher)
        fade = tl.exp(best - higher)
        # Weights meet values in the type of the values, as in the blocks.
        seen = weight.to(v_new.dtype).to(tl.float32)[:, None] * v_new.to(tl.float32)[None, :]
        mixed = mixed * fade[:, None] + seen
        total = total * fade + weight
        best = higher

    if PARTS == 1:
        answer = mixed / total[:, None]
        at = out + (row * HEADS + head[:, None]) * SIZE + dim[None, :]
        tl.store(at, answer.to(out.dtype.element_ty), mask=own)
    else:
        line = (row * HEADS + head) * PARTS + part
        tl.store(partial + line[:, None] * SIZE + dim[None, :], mixed, mask=own)
        tl.store(extent + line * 2, best, mask=member < GROUP)
        tl.store(extent + line * 2 + 1, total, mask=member < GROUP)


@triton.jit
def combine(
    partial, extent, out,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Joins the parts of one row and head; a part without positions has total 0."""
    line = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    part = tl.arange(0, SPAN)
    dim = tl.arange(0, WIDTH)
    known = part < PARTS
    real = dim < SIZE
    at = (line * PARTS + part) * 2
    best = tl.load(extent + at, mask=known, other=float("-inf"))
    total = tl.load(extent + at + 1, mask=known, other=0.0)
    fade = tl.exp(best - tl.max(best, 0))
    mixed = tl.load(
        partial + (line * PARTS + part)[:, None] * SIZE + dim[None, :],
        mask=known[:, None] & real[None, :], other=0.0,
    )  # fmt: skip
    answer = tl.sum(mixed * fade[:, None], 0) / tl.sum(total * fade, 0)
    tl.store(out + line * SIZE + dim, answer.to(out.dtype.element_ty), mask=real)


@triton.jit
def store_prompt(
    key, value, keys, values, slots, first_slot, length,
    key_row, key_head, key_pos, value_row, value_head, value_pos,
    k_slot, k_head, k_pos, v_slot, v_head, v_pos,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Copies one block of one prompt's keys and values of one head into its slot."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    position = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, WIDTH)
    slot = row + first_slot
    if LISTED:
        slot = tl.load(slots + row)
    at = row * key_row + head * key_head + position[:, None] * key_pos + dim[None, :]
    to = slot * k_slot + head * k_head + position[:, None] * k_pos + dim[None, :]
    real = (position < length)[:, None] & (dim < KEY_SIZE)[None, :]
    tl.store(keys + to, tl.load(key + at, mask=real, other=0.0), mask=real)
    at = row * value_row + head * value_head + position[:, None] * value_pos + dim[None, :]
    to = slot * v_slot + head * v_head + position[:, None] * v_pos + dim[None, :]
    real = (position < length)[:, None] & (dim < VALUE_SIZE)[None, :]
    tl.store(values + to, tl.load(value + at, mask=real, other=0.0), mask=real)
