"""The Triton kernels behind `ops_triton`; imported only where Triton is present.

Shapes: N tokens, E features, H heads, D head size, F features of the MLP. Arithmetic is fp32;
results are rounded where the modules round them. Only compile-time arguments are annotated:
Triton reads annotations as such.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def residual_norm(
    stream, delta, weight, bias, out, size, eps,
    ADDED: tl.constexpr, RMS: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token: add `delta` to the residual stream in place, normalise the sum into `out`."""
    row = tl.program_id(0).to(tl.int64) * size
    feature = tl.arange(0, WIDTH)
    real = feature < size
    x = tl.load(stream + row + feature, mask=real, other=0.0).to(tl.float32)
    if ADDED:
        x += tl.load(delta + row + feature, mask=real, other=0.0).to(tl.float32)
        x = x.to(stream.dtype.element_ty)
        tl.store(stream + row + feature, x, mask=real)
        x = x.to(tl.float32)
    scale = tl.load(weight + feature, mask=real, other=0.0).to(tl.float32)
    if RMS:
        y = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        y = y.to(stream.dtype.element_ty).to(tl.float32) * scale
    else:
        centred = tl.where(real, x - tl.sum(x, 0) / size, 0.0)
        y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / size + eps) * scale
        if BIASED:
            y += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row + feature, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def head_norm(
    heads, weight, out, length, count, eps,
    row_step, head_step, token_step, RMS_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """RMS norm of HEADS heads of one token; `out` is [B, P, H, D] in memory."""
    token = tl.program_id(0).to(tl.int64)
    row = token // length
    place = token % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, WIDTH)
    real = (head < count)[:, None] & (dim < RMS_SIZE)[None, :]
    at = heads + row * row_step + place * token_step + head[:, None] * head_step + dim[None, :]
    x = tl.load(at, mask=real, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / RMS_SIZE + eps)[:, None]
    y = y.to(out.dtype.element_ty).to(tl.float32)
    y *= tl.load(weight + dim, mask=dim < RMS_SIZE, other=0.0).to(tl.float32)[None, :]
    to = out + (token * count + head[:, None]) * RMS_SIZE + dim[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def rotate(
    query, key, cos, sin, length, heads, kv_heads,
    q_row, q_head, q_token, k_row, k_head, k_token,
    HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, QUERY_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token's query or key in place (Su et al. 2021, in halves)."""
    token = tl.program_id(0).to(tl.int64)
    row = token // length
    place = token % length
    program = tl.program_id(1)
    base = query + row * q_row + place * q_token
    step = q_head
    count = heads
    first = program * HEADS
    if program >= QUERY_PROGRAMS:
        base = key + row * k_row + place * k_token
        step = k_head
        count = kv_heads
        first = (program - QUERY_PROGRAMS) * HEADS
    head = first + tl.arange(0, HEADS)
    dim = tl.arange(0, WIDTH)
    real = (head < count)[:, None] & (dim < HALF)[None, :]
    at = base + head[:, None] * step + dim[None, :]
    low = tl.load(at, mask=real, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    known = dim < HALF
    angle = token * 2 * HALF + dim
    cos_low = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angle + HALF, mask=known, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angle + HALF, mask=known, other=0.0).to(tl.float32)[None, :]
    kind = query.dtype.element_ty
    # The products are rounded before they meet, as tensors of that type are.
    new_low = (low * cos_low).to(kind).to(tl.float32) - (high * sin_low).to(kind).to(tl.float32)
    new_high = (high * cos_high).to(kind).to(tl.float32) + (low * sin_high).to(kind).to(tl.float32)
    tl.store(at, new_low.to(kind), mask=real)
    tl.store(at + HALF, new_high.to(kind), mask=real)


@triton.jit
def gated_silu(gate, up, out, gate_row, up_row, size, WIDTH: tl.constexpr):
    """silu(gate) * up over one block of one token's features."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = feature < size
    g = tl.load(gate + row * gate_row + feature, mask=real, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + feature, mask=real, other=0.0).to(tl.float32)
    g = (g * tl.sigmoid(g)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + feature, (g * u).to(out.dtype.element_ty), mask=real)
