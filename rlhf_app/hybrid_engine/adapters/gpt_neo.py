"""GPT-Neo: logits without scaling, local layers with a band that no mask shows."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from rlhf_app.hybrid_engine.attention import AttentionCall, serve

ATTENTION = GPTNeoSelfAttention


def forward(
    layer: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """One attention layer.

    Args:
        layer: a `GPTNeoSelfAttention`.
        hidden_states: [B, P, H * D].
        attention_mask: the causal mask; the layer's own band is not in it.

    Returns:
        ([B, P, H * D], None).
    """
    query, key, value = (
        layer._split_heads(project(hidden_states), layer.num_heads, layer.head_dim)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    window = layer.config.window_size if layer.attention_type == "local" else None
    mask = attention_mask if window is None else None
    call = AttentionCall(layer.layer_id, query, key, value, mask, 1.0, window, None, {})
    return layer.out_proj(serve(call).transpose(1, 2).flatten(2)), None
