"""BLOOM: positions only through ALiBi, its bias and the logits with it rounded."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

from rlhf_app.hybrid_engine.alibi import Alibi
from rlhf_app.hybrid_engine.attention import AttentionCall, serve

ATTENTION = BloomAttention


@cache
def model_alibi(heads: int, dtype: torch.dtype, device: torch.device) -> Alibi:
    """The bias of every layer of every model with these heads.

    Args:
        heads: of queries.
        dtype: of the hidden states.
        device: where attention runs.
    """

    def make(length: int) -> torch.Tensor:
        everything = torch.ones((1, length), dtype=torch.int64, device=device)
        return build_alibi_tensor(everything, heads, dtype).reshape(heads, length)

    return Alibi(make)


def forward(
    layer: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One attention layer.

    Args:
        layer: a `BloomAttention`.
        hidden_states: [B, P, H * D].
        residual: [B, P, H * D], added to the output.
        attention_mask: the causal mask.

    Returns:
        ([B, P, H * D], None).
    """
    query, key, value = layer._reshape(layer.query_key_value(hidden_states))
    bias = model_alibi(layer.num_heads, hidden_states.dtype, hidden_states.device)
    scale = layer.inv_norm_factor
    call = AttentionCall(
        layer.layer_idx, query, key, value, attention_mask, scale, None, None, {}, bias,
        rounded=True,
    )  # fmt: skip
    return residual + layer.dense(serve(call).transpose(1, 2).flatten(2)), None
