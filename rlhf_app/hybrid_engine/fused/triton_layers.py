"""The Triton kernels behind `ops_triton`; imported only where Triton is present.

Shapes: N tokens, E features, H heads, D head size, F features of the MLP. Arithmetic is fp32;
results are rounded where the modules round them. Only compile-time arguments are annotated:
Triton reads annotations as such.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Whether this Triton can start a kernel while the one before it still runs (Hopper and later).
CAN_OVERLAP = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")


@triton.jit
def partial_product(
    x, weight, sums, rows, features, size, share,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All rows, OUT output features, the inner features of one split, `share` of `size`.

    `weight` is [features, size], `sums` [splits, rows, features] fp32; `features` is a multiple of
    OUT, `size` and `share` of IN. At least one inner feature falls to every split.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    feature = tl.program_id(0) * OUT + tl.arange(0, OUT)
    inner = tl.arange(0, IN)
    split = tl.program_id(1)
    low = split * share
    high = tl.minimum(low + share, size)
    # Rows that are not there repeat the last one: loads without a mask are simpler to pipeline.
    from_x = x + tl.minimum(row, rows - 1)[None, :] * size + inner[:, None]
    from_weight = weight + feature.to(tl.int64)[:, None] * size + inner[None, :]
    # Features along the first dimension: few rows fill the second of the tensor cores' shapes.
    total = tl.zeros([OUT, ROWS], tl.float32)
    for at in range(low, high, IN):
        total = tl.dot(tl.load(from_weight + at), tl.load(from_x + at), total)
    to = sums + (split * rows + row)[None, :] * features + feature[:, None]
    tl.store(to, total, mask=(row < rows)[None, :])


@triton.jit
def residual_norm(
    stream, delta, delta_bias, weight, bias, out, size, split_step, eps,
    SPLITS: tl.constexpr, SHARED: tl.constexpr, RMS: tl.constexpr, BIASED: tl.constexpr,
    OVERLAP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token: add to the residual stream in place, normalise the sum into `out`.

    What is added is the sum of SPLITS rows of `delta`, and `delta_bias` where all rows SHARED one;
    with 0 splits, nothing is.
    """
    row = tl.program_id(0).to(tl.int64) * size
    feature = tl.arange(0, WIDTH)
    real = feature < size
    # Parameters first: nothing that still runs writes them.
    scale = tl.load(weight + feature, mask=real, other=0.0).to(tl.float32)
    if BIASED:
        shift = tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)
    if SHARED:
        shared = tl.load(delta_bias + feature, mask=real, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for all that `partial_product` reads and writes
    x = tl.load(stream + row + feature, mask=real, other=0.0).to(tl.float32)
    if SPLITS > 0:
        added = tl.load(delta + row + feature, mask=real, other=0.0).to(tl.float32)
        for split in tl.static_range(1, SPLITS):
            part = tl.load(delta + split * split_step + row + feature, mask=real, other=0.0)
            added += part.to(tl.float32)
        if SHARED:
            added += shared
        # A projection is rounded once, bias included, before it is added.
        x += added.to(stream.dtype.element_ty).to(tl.float32)
        x = x.to(stream.dtype.element_ty)
        tl.store(stream + row + feature, x, mask=real)
        x = x.to(tl.float32)
    if RMS:
        y = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        y = y.to(stream.dtype.element_ty).to(tl.float32) * scale
    else:
        centred = tl.where(real, x - tl.sum(x, 0) / size, 0.0)
        y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / size + eps) * scale
        if BIASED:
            y += shift
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
