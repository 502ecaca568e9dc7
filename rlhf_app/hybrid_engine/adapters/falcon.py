"""Falcon: rotary positions or ALiBi; one, several or as many kv heads as query heads.

Shapes: B rows, P tokens, H query heads, K kv heads, D head size.

transformers repeats the kv heads of the newer architecture before it caches them; here each
is stored once.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import (
    FalconAttention,
    apply_rotary_pos_emb,
    build_alibi_tensor,
)

from rlhf_app.hybrid_engine.alibi import Alibi
from rlhf_app.hybrid_engine.attention import AttentionCall, serve

ATTENTION = FalconAttention


@cache
def model_alibi(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Alibi:
    """The bias of every layer of every model with these heads: scaled with the logits.

    Args:
        heads: of queries.
        head_dim: size of one query.
        dtype: of the hidden states.
        device: where attention runs.
    """

    def make(length: int) -> torch.Tensor:
        everything = torch.ones((1, length), dtype=torch.int64, device=device)
        bias = build_alibi_tensor(everything, heads, dtype).reshape(heads, length)
        return bias / math.sqrt(head_dim)

    return Alibi(make)


def forward(
    layer: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One attention layer.

    Args:
        layer: a `FalconAttention`.
        hidden_states: [B, P, H * D].
        alibi: the model's own bias, which knows nothing of stored keys; None: rotary positions.
        attention_mask: the causal mask.
        position_embeddings: cosines and sines, [B, P, D] each.

    Returns:
        ([B, P, H * D], None).
    """
    query, key, value = _heads(layer, layer.query_key_value(hidden_states))
    bias = None
    if alibi is None:
        assert position_embeddings is not None
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        bias = _bias(layer, hidden_states)
    scale = layer.head_dim**-0.5
    call = AttentionCall(
        layer.layer_idx, query, key, value, attention_mask, scale, None, None, {}, bias
    )
    return layer.dense(serve(call).transpose(1, 2).flatten(2)), None


def _bias(layer: Any, hidden_states: torch.Tensor) -> Alibi:
    return model_alibi(layer.num_heads, layer.head_dim, hidden_states.dtype, hidden_states.device)


def _heads(layer: Any, fused: torch.Tensor) -> list[torch.Tensor]:
    """Query [B, H, P, D], key and value [B, K, P, D] out of the fused projection."""
    batch, length, _ = fused.shape
    groups = layer.num_heads // layer.num_kv_heads
    # Every layout is K groups of their queries, one key and one value.
    fused = fused.view(batch, length, layer.num_kv_heads, groups + 2, layer.head_dim)
    parts = fused[..., :-2, :], fused[..., -2:-1, :], fused[..., -1:, :]
    return [part.flatten(2, 3).transpose(1, 2) for part in parts]
