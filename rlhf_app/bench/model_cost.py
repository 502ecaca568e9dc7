"""Reads off a model what `limits` needs to know of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlhf_app.bench.limits import LayerCost, ModelCost


def model_cost(model: Any) -> ModelCost:
    """Bytes and multiplications of a causal LM, or of a scalar-head model's trunk.

    Every expert of a mixture counts as read and computed, so there the limit is too slow.

    Args:
        model: its parameters may be anywhere.
    """
    embedding = getattr(model, "get_output_embeddings", lambda: None)()
    head = None if embedding is None else embedding.weight
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter is not head
    }
    read = [p for p in model.parameters() if id(p) not in tables]
    matrices = [p for p in read if p.ndim >= 2 and p is not head]
    return ModelCost(
        weight_bytes=sum(_numel(p) * p.element_size() for p in read),
        layer_weights=sum(map(_numel, matrices)),
        head_weights=0 if head is None else _numel(head),
        layers=_layers(model.config.get_text_config(decoder=True), next(model.parameters()).dtype),
    )


def _numel(parameter: torch.Tensor) -> int:
    """Of the whole parameter: ZeRO-3 keeps a part, and the number in `ds_numel`."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _layers(config: Any, dtype: torch.dtype) -> tuple[LayerCost, ...]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    return tuple(
        LayerCost(
            kv_bytes=2 * kv_heads * head_dim * dtype.itemsize,
            width=heads * head_dim,
            window=window if kind == "sliding_attention" else None,
        )
        for kind in kinds
    )
