"""Attention over dense tensors: masks, softcaps and biases as the models ask for them.

Shapes: B rows, H heads, P queries, L keys, D head size.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

# Head sizes up to this use two matrix products on the CPU: 20-25 % faster at size 8.
SMALL_HEAD = 16


def banded_causal(length: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """An additive mask under which a query sees itself and up to window - 1 tokens before it.

    Args:
        length: P.
        window: None is all tokens before it.
        like: gives dtype and device.

    Returns:
        [P, P], 0 or -inf.
    """
    position = torch.arange(length, device=like.device)
    hidden = position[None, :] > position[:, None]
    if window is not None:
        hidden |= position[None, :] <= position[:, None] - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, -math.inf
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention with an additive mask, logits capped where the model asks for it.

    Args:
        query: [B, H, P, D].
        key: [B, H, L, D].
        value: [B, H, L, D].
        mask: added to the capped logits, broadcast to [B, H, P, L]; or None.
        scale: of the logits.
        softcap: c in c*tanh(logits/c), or None.

    Returns:
        [B, H, P, D].
    """
    # The CPU's fused kernel costs more than it saves on small heads. (In fp32: elsewhere the
    # products would round the logits.)
    small = not query.is_cuda and query.shape[-1] <= SMALL_HEAD and query.dtype == torch.float32
    if softcap is None and not small:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    logits = torch.matmul(query * scale, key.transpose(-1, -2))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits + mask
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value)


def attend_rounded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention whose logits, bias included, are rounded to the query's type before the softmax.

    Args:
        query: [B, H, P, D].
        key: [B, H, L, D].
        value: [B, H, L, D].
        mask: added after the rounding, broadcast to [B, H, P, L]; or None.
        bias: [H, P or 1, L] in the query's type.
        scale: of the logits.

    Returns:
        [B, H, P, D].
    """
    batch = query.shape[0]
    biases = bias.expand(batch, *bias.shape).flatten(0, 1)
    query_, key_ = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
    logits = torch.baddbmm(biases, query_, key_, alpha=scale).unflatten(0, (batch, -1))
    if mask is not None:
        logits = logits + mask
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value)
