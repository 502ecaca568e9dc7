"""What a decoder computes, read from its modules: the plan that a `FusedDecoder` follows.

A plan holds modules and numbers, never tensors, so that weights which training replaces or moves
are followed. Two plans are equal when they hold the same modules and the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the last dimension.

    Attributes:
        kind: "layer" subtracts the mean and may have a bias; "rms" does neither, and rounds to
            the dtype of its input before it multiplies by the weight.
        module: has `weight` and, where kind is "layer", `bias` (which may be None).
        eps: added to the variance, or to the mean square.
    """

    kind: Literal["layer", "rms"]
    module: nn.Module
    eps: float


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """Embedded positions, added to the embedded tokens.

    Attributes:
        module: the table.
        offset: row of position 0.
    """

    module: nn.Embedding
    offset: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One pre-norm layer: x += output(attention(norm(x))), then x += mlp(norm(x)).

    Attributes:
        index: which keys and values of the workspace are its own.
        input_norm: before attention.
        query: to heads x head_dim features.
        key: to kv_heads x head_dim features.
        value: to kv_heads x head_dim features.
        query_norm: of each head of the query, before the rotation; or None.
        key_norm: of each head of the key; or None.
        output: from heads x head_dim features.
        mlp_norm: before the MLP.
        gate: down(activation(gate(y)) * up(y)); where None, down(activation(up(y))).
        up: see `gate`.
        down: see `gate`.
        activation: name in transformers' ACT2FN: relu, silu, gelu or gelu_new.
        heads: of the query.
        kv_heads: of key and value; divides `heads`.
        head_dim: features of one head.
        scale: of the attention logits.
        window: keys a query sees, itself included; None is all.
    """

    index: int
    input_norm: Norm
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: nn.Linear
    mlp_norm: Norm
    gate: nn.Linear | None
    up: nn.Linear
    down: nn.Linear
    activation: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """A causal LM from ids to logits.

    Attributes:
        embedding: of tokens.
        positions: added to the embedded tokens; or None.
        embed_scale: the embedded tokens are multiplied by this.
        rotary: `rotary(x, positions_BP)` gives cos and sin [B, P, head_dim] in the dtype of `x`
            for the rotation of queries and keys, in halves; or None.
        layers: in order.
        final_norm: after the last layer.
        head: to the vocabulary; its weight may be the embedding's.
    """

    embedding: nn.Embedding
    positions: LearnedPositions | None
    embed_scale: float
    rotary: nn.Module | None
    layers: tuple[LayerPlan, ...]
    final_norm: Norm
    head: nn.Linear

    def modules(self) -> Iterator[nn.Module]:
        """Every module whose parameters a forward reads."""
        yield self.embedding
        if self.positions is not None:
            yield self.positions.module
        for layer in self.layers:
            linears = layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up
            norms = layer.input_norm, layer.query_norm, layer.key_norm, layer.mlp_norm
            yield from (linear for linear in (*linears, layer.down) if linear is not None)
            yield from (norm.module for norm in norms if norm is not None)
        yield self.final_norm.module
        yield self.head


def read_plan(model: Any) -> DecoderPlan | str:
    """The plan of a model of a known family, in evaluation mode and with whole weights.

    A family is known by the exact classes of its modules. Whatever may change what they compute
    and is not understood here (subclasses, hooks, adapters, replaced forwards, sliced weights)
    leaves the module's own forward the only way.

    Args:
        model: any causal LM; nothing of it is changed.

    Returns:
        The plan, or in a few words why there is none.
    """
    # Imported here: the readers build what this module defines.
    from rlhf_app.hybrid_engine.fused.families import read
    from rlhf_app.hybrid_engine.fused.genuine import NotUnderstood

    try:
        return read(model)
    except NotUnderstood as reason:
        return str(reason)
