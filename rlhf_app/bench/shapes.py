"""Well-known architectures by short name, as transformers configs for random weights."""

from __future__ import annotations

from typing import Any

from rlhf_app.errors import ConfigError
from rlhf_app.models.shapes import KNOWN_MODELS, ModelShape

#: Short name -> Hub id of the model whose dimensions it has.
_HUB_IDS = {
    "opt-125m": "facebook/opt-125m",
    "opt-350m": "facebook/opt-350m",
    "opt-1.3b": "facebook/opt-1.3b",
    "opt-2.7b": "facebook/opt-2.7b",
    "opt-6.7b": "facebook/opt-6.7b",
    "opt-13b": "facebook/opt-13b",
    "opt-30b": "facebook/opt-30b",
    "opt-66b": "facebook/opt-66b",
    "llama-1b": "meta-llama/llama-3.2-1b",
    "llama-8b": "meta-llama/llama-3.1-8b",
    "qwen-0.5b": "qwen/qwen2.5-0.5b",
    "qwen-7b": "qwen/qwen2.5-7b",
}
# transformers has one class for each name; Llama 3's rotary base, as its positions, costs nothing.
_CLASSES = {"opt": "OPTConfig", "llama": "LlamaConfig", "qwen": "Qwen2Config"}

_MISTRAL_7B = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}
#: Runs on a CPU in seconds.
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
TINY = "tiny"
NAMES: tuple[str, ...] = (*_HUB_IDS, "mistral-7b", TINY)


def check_shape(name: str, flag: str) -> str:
    """The name, if there is such a shape.

    Raises:
        ConfigError: with the names that there are.
    """
    if name.lower() not in NAMES:
        raise ConfigError(f"{flag} {name}: unknown shape; known are {', '.join(NAMES)}")
    return name.lower()


def config_of(name: str) -> Any:
    """A transformers config with the dimensions of a shape.

    Args:
        name: one of `NAMES`.
    """
    import transformers

    if name == TINY:
        return transformers.LlamaConfig(**_TINY)
    if name == "mistral-7b":
        return transformers.MistralConfig(**_MISTRAL_7B)
    shape = KNOWN_MODELS[_HUB_IDS[name]]
    make = getattr(transformers, _CLASSES[name.partition("-")[0]])
    return make(**(_opt(shape) if shape.family == "opt" else _llama(shape)))


def _opt(shape: ModelShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "ffn_dim": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.positions,
        "word_embed_proj_dim": shape.embed,
        # OPT-350m alone has its norms after the sublayers, and none at the end.
        "do_layer_norm_before": shape.final_norm,
        "dropout": 0.0,
    }


def _llama(shape: ModelShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
    }
