"""Readers of plans: one per group of families whose modules are laid out alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import functional as F

from rlhf_app.hybrid_engine.fused import genuine
from rlhf_app.hybrid_engine.fused.genuine import NotUnderstood
from rlhf_app.hybrid_engine.fused.plan import DecoderPlan, LayerPlan, LearnedPositions, Norm

_ACTIVATIONS = {
    "ReLU": "relu", "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_new",
}  # fmt: skip
# Window of an attention layer; where None, the family has none.
_Window = Callable[[Any], int | None]
_LLAMA_LIKE: dict[str, _Window] = {
    "llama": lambda attention: None,
    "mistral": lambda attention: getattr(attention.config, "sliding_window", None),
    "qwen2": lambda attention: attention.sliding_window,
    "qwen3": lambda attention: attention.sliding_window,
}
_PREFIXES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def read(model: Any) -> DecoderPlan:
    """The plan of a model in evaluation mode.

    Raises:
        NotUnderstood: there is none.
    """
    genuine.no_global_hooks()
    package = type(model).__module__
    family = package.rsplit(".modeling_", 1)[-1]
    if family == "opt":
        plan = _opt(model, package)
    elif family in _LLAMA_LIKE:
        plan = _llama_like(model, package, _PREFIXES[family], _LLAMA_LIKE[family])
    else:
        raise NotUnderstood(f"no plan for a {type(model).__name__}")
    genuine.one_kind(plan.modules())
    return plan


def _opt(model: Any, package: str) -> DecoderPlan:
    """OPT with the norms before attention and MLP: all sizes but 350M."""
    check = genuine.genuine
    check(model, package, "OPTForCausalLM")
    decoder = check(model.model.decoder, package, "OPTDecoder")
    if decoder.project_in is not None or decoder.project_out is not None:
        raise NotUnderstood("projected embeddings")
    if decoder.final_layer_norm is None:
        raise NotUnderstood("no final norm")
    positions = check(decoder.embed_positions, package, "OPTLearnedPositionalEmbedding")
    genuine.whole_table(positions)
    layers = []
    for index, layer in enumerate(_layers(decoder)):
        check(layer, package, "OPTDecoderLayer")
        attention = check(layer.self_attn, package, "OPTAttention")
        if not layer.do_layer_norm_before:
            raise NotUnderstood("norms after attention and MLP")
        layers.append(
            LayerPlan(
                input_norm=_layer_norm(layer.self_attn_layer_norm),
                query_norm=None,
                key_norm=None,
                output=genuine.linear(attention.out_proj),
                mlp_norm=_layer_norm(layer.final_layer_norm),
                gate=None,
                up=genuine.linear(layer.fc1),
                down=genuine.linear(layer.fc2),
                activation=_activation(layer.activation_fn),
                scale=attention.scaling,
                window=None,
                **_attention(attention, index),
            )
        )
    return DecoderPlan(
        embedding=genuine.embedding(decoder.embed_tokens),
        positions=LearnedPositions(positions, positions.offset),
        embed_scale=1.0,
        rotary=None,
        layers=tuple(layers),
        final_norm=_layer_norm(decoder.final_layer_norm),
        head=genuine.linear(model.lm_head),
    )


def _llama_like(model: Any, package: str, prefix: str, window: _Window) -> DecoderPlan:
    """Llama, Mistral, Qwen2 and Qwen3: RMS norms, rotations, a gated MLP."""

    def check(module: Any, name: str) -> Any:
        return genuine.genuine(module, package, prefix + name)

    def norm(module: Any) -> Norm:
        return Norm("rms", check(module, "RMSNorm"), module.variance_epsilon)

    check(model, "ForCausalLM")
    decoder = check(model.model, "Model")
    layers = []
    for index, layer in enumerate(_layers(decoder)):
        check(layer, "DecoderLayer")
        attention, mlp = check(layer.self_attn, "Attention"), check(layer.mlp, "MLP")
        normed = prefix == "Qwen3"
        layers.append(
            LayerPlan(
                input_norm=norm(layer.input_layernorm),
                query_norm=norm(attention.q_norm) if normed else None,
                key_norm=norm(attention.k_norm) if normed else None,
                output=genuine.linear(attention.o_proj),
                mlp_norm=norm(layer.post_attention_layernorm),
                gate=genuine.linear(mlp.gate_proj),
                up=genuine.linear(mlp.up_proj),
                down=genuine.linear(mlp.down_proj),
                activation=_activation(mlp.act_fn),
                scale=attention.scaling,
                window=window(attention),
                **_attention(attention, index),
            )
        )
    return DecoderPlan(
        embedding=genuine.embedding(decoder.embed_tokens),
        positions=None,
        embed_scale=1.0,
        rotary=check(decoder.rotary_emb, "RotaryEmbedding"),
        layers=tuple(layers),
        final_norm=norm(decoder.norm),
        head=genuine.linear(model.lm_head),
    )


def _layers(decoder: Any) -> nn.ModuleList:
    layers: nn.ModuleList = decoder.layers
    if not 0 < len(layers) == decoder.config.num_hidden_layers:
        raise NotUnderstood(
            f"{len(layers)} layers where the config says {decoder.config.num_hidden_layers}"
        )
    return layers


def _attention(attention: Any, index: int) -> dict[str, Any]:
    """What all families' attention layers name alike."""
    query, key, value = (
        genuine.linear(projection)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    size = attention.head_dim
    heads, kv_heads = query.out_features // size, key.out_features // size
    if attention.layer_idx != index:
        raise NotUnderstood(f"layer {index} with the keys and values of {attention.layer_idx}")
    return {
        "index": index, "query": query, "key": key, "value": value,
        "heads": heads, "kv_heads": kv_heads, "head_dim": size,
    }  # fmt: skip


def _layer_norm(module: Any) -> Norm:
    genuine.genuine(module, "torch.nn.modules.normalization", "LayerNorm")
    if module.weight is None:
        raise NotUnderstood("a layer norm without a weight")
    return Norm("layer", module, module.eps)


def _activation(module: Any) -> str:
    kind = type(module)
    genuine.genuine(module, kind.__module__, kind.__qualname__)
    name = _ACTIVATIONS.get(kind.__name__)
    if name is None or (name == "gelu" and module.act is not F.gelu):
        raise NotUnderstood(f"the activation {kind.__name__}")
    return name
