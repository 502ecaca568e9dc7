"""Shapes and exact parameter counts of models, without torch, weights or network.

Dry runs and length checks need to know a model before anything is downloaded. Well-known
models are in a table by Hub id; a local directory tells its shape in `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_app.home import expanded
from rlhf_app.models.gguf_files import gguf_config, gguf_file

Family = Literal["opt", "llama"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder.

    Attributes:
        family: opt is biased linears, layer norms and learned positions; llama is gated MLP, RMS
            norms and rotary positions (Llama, Mistral, Qwen2, Qwen3).
        hidden, layers, heads, kv_heads, head_dim, ffn, vocab, positions: as named.
        tied: input and output embeddings are one matrix.
        embed: width of the embeddings; differs from hidden in OPT-350m only, which projects.
        qkv_bias: query, key and value have biases (llama family; Qwen2).
        o_bias: the attention output has one (llama family with `attention_bias`).
        mlp_bias: the three MLP matrices have biases.
        qk_norm: RMS norms over each query and key head (Qwen3).
        final_norm: a norm after the last layer; OPT-350m has none.
    """

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    tied: bool
    embed: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    final_norm: bool = True

    @property
    def parameters(self) -> int:
        """Trainable numbers of the causal LM; tied embeddings count once."""
        return self.backbone_parameters + (0 if self.tied else self.vocab * self.embed)

    @property
    def backbone_parameters(self) -> int:
        """The same without the output embedding: what a reward model or critic keeps."""
        embeddings = self.vocab * self.embed
        if self.family == "opt":
            embeddings += (self.positions + 2) * self.hidden  # OPT's table starts at offset 2
            if self.embed != self.hidden:
                embeddings += 2 * self.embed * self.hidden
            layer = self._opt_layer()
            norm = 2 * self.hidden
        else:
            layer = self._llama_layer()
            norm = self.hidden
        return embeddings + self.layers * layer + (norm if self.final_norm else 0)

    def _opt_layer(self) -> int:
        attention = 4 * (self.hidden * self.hidden + self.hidden)
        mlp = 2 * self.hidden * self.ffn + self.ffn + self.hidden
        norms = 2 * 2 * self.hidden
        return attention + mlp + norms

    def _llama_layer(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden
        attention += (queries + 2 * keys) * self.qkv_bias + self.hidden * self.o_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden * self.ffn + (2 * self.ffn + self.hidden) * self.mlp_bias
        return attention + mlp + 2 * self.hidden


def _opt(hidden: int, layers: int, heads: int, embed: int | None = None) -> ModelShape:
    return ModelShape(
        family="opt",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=50272,
        positions=2048,
        tied=True,
        embed=embed or hidden,
        final_norm=embed is None,
    )


def _llama(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    *,
    vocab: int,
    positions: int,
    tied: bool = False,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> ModelShape:
    return ModelShape(
        family="llama",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        ffn=ffn,
        vocab=vocab,
        positions=positions,
        tied=tied,
        embed=hidden,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _table() -> dict[str, ModelShape]:
    """Hub id, lower case -> shape."""
    table = {
        "facebook/opt-125m": _opt(768, 12, 12),
        "facebook/opt-350m": _opt(1024, 24, 16, embed=512),
        "facebook/opt-1.3b": _opt(2048, 24, 32),
        "facebook/opt-2.7b": _opt(2560, 32, 32),
        "facebook/opt-6.7b": _opt(4096, 32, 32),
        "facebook/opt-13b": _opt(5120, 40, 40),
        "facebook/opt-30b": _opt(7168, 48, 56),
        "facebook/opt-66b": _opt(9216, 64, 72),
    }
    llama2 = {
        "7b": _llama(4096, 32, 32, 32, 11008, vocab=32000, positions=4096),
        "13b": _llama(5120, 40, 40, 40, 13824, vocab=32000, positions=4096),
        "70b": _llama(8192, 80, 64, 8, 28672, vocab=32000, positions=4096),
    }
    for size, shape in llama2.items():
        for variant in ("hf", "chat-hf"):
            table[f"meta-llama/llama-2-{size}-{variant}"] = shape
    for name, positions in (("meta-llama-3", 8192), ("llama-3.1", 131072)):
        for suffix in ("", "-instruct"):
            table[f"meta-llama/{name}-8b{suffix}"] = _llama(
                4096, 32, 32, 8, 14336, vocab=128256, positions=positions
            )
            table[f"meta-llama/{name}-70b{suffix}"] = _llama(
                8192, 80, 64, 8, 28672, vocab=128256, positions=positions
            )
    for suffix in ("", "-instruct"):
        table[f"meta-llama/llama-3.2-1b{suffix}"] = _llama(
            2048, 16, 32, 8, 8192, vocab=128256, positions=131072, tied=True
        )
        table[f"meta-llama/llama-3.2-3b{suffix}"] = _llama(
            3072, 28, 24, 8, 8192, vocab=128256, positions=131072, tied=True
        )
    return table | _qwen2() | _qwen3()


def _qwen2() -> dict[str, ModelShape]:
    rows = {
        "0.5b": (896, 24, 14, 2, 4864, 151936, True, 32768),
        "1.5b": (1536, 28, 12, 2, 8960, 151936, True, 131072),
        "3b": (2048, 36, 16, 2, 11008, 151936, True, 32768),
        "7b": (3584, 28, 28, 4, 18944, 152064, False, 131072),
        "14b": (5120, 48, 40, 8, 13824, 152064, False, 131072),
        "32b": (5120, 64, 40, 8, 27648, 152064, False, 131072),
        "72b": (8192, 80, 64, 8, 29568, 152064, False, 131072),
    }
    table = {}
    for size, (hidden, layers, heads, kv_heads, ffn, vocab, tied, positions) in rows.items():
        for suffix in ("", "-instruct"):
            table[f"qwen/qwen2.5-{size}{suffix}"] = _llama(
                hidden,
                layers,
                heads,
                kv_heads,
                ffn,
                vocab=vocab,
                positions=32768 if suffix else positions,
                tied=tied,
                qkv_bias=True,
            )
    return table


def _qwen3() -> dict[str, ModelShape]:
    rows = {
        "0.6b": (1024, 28, 16, 3072, True),
        "1.7b": (2048, 28, 16, 6144, True),
        "4b": (2560, 36, 32, 9728, True),
        "8b": (4096, 36, 32, 12288, False),
        "14b": (5120, 40, 40, 17408, False),
        "32b": (5120, 64, 64, 25600, False),
    }
    table = {}
    for size, (hidden, layers, heads, ffn, tied) in rows.items():
        for suffix, positions in (("", 40960), ("-base", 32768)):
            table[f"qwen/qwen3-{size}{suffix}"] = _llama(
                hidden,
                layers,
                heads,
                8,
                ffn,
                vocab=151936,
                positions=positions,
                tied=tied,
                head_dim=128,
                qk_norm=True,
            )
    return table


KNOWN_MODELS: Mapping[str, ModelShape] = _table()


def model_shape(name: str) -> ModelShape | None:
    """Shape of a model by Hub id or local directory.

    Args:
        name: Hub id (any case) or directory.

    Returns:
        None where it is neither in the table nor a directory of a family known here.
    """
    config = read_model_config(name)
    if config is not None:
        return shape_from_config(config)
    return KNOWN_MODELS.get(name.lower())


def model_positions(name: str) -> int | None:
    """Most tokens a model takes, or None where that is unknown or unlimited."""
    config = read_model_config(name)
    if config is not None:
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            value = config.get(key)
            if isinstance(value, int) and value > 0:
                return value
        return None
    shape = KNOWN_MODELS.get(name.lower())
    return shape.positions if shape else None


def read_model_config(name: str) -> dict[str, Any] | None:
    """`config.json` of a local directory, or None when there is none or it is not JSON.

    Of a GGUF file, or a directory with nothing else: the same from its header.
    """
    if (file := gguf_file(name)) is not None:
        return gguf_config(file)
    path = expanded(name) / "config.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def shape_from_config(config: Mapping[str, Any]) -> ModelShape | None:
    """Shape from the values of a Hugging Face `config.json`; None for other families.

    Keys that a file leaves out have the defaults of that family's transformers config.
    """
    kind = config.get("model_type")
    try:
        if kind == "opt":
            return _opt_from_config(config)
        if kind in ("llama", "mistral", "qwen2", "qwen3"):
            return _llama_from_config(config, str(kind))
    except (KeyError, TypeError):
        return None
    return None


def _opt_from_config(config: Mapping[str, Any]) -> ModelShape | None:
    if not (config.get("enable_bias", True) and config.get("layer_norm_elementwise_affine", True)):
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    normed_first = config.get("do_layer_norm_before", True)
    return ModelShape(
        family="opt",
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config["ffn_dim"],
        vocab=config["vocab_size"],
        positions=config["max_position_embeddings"],
        tied=config.get("tie_word_embeddings", True),
        embed=config.get("word_embed_proj_dim") or hidden,
        final_norm=normed_first and not config.get("_remove_final_layer_norm", False),
    )


def _llama_from_config(config: Mapping[str, Any], kind: str) -> ModelShape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    default_head = 128 if kind == "qwen3" else hidden // heads
    biased = bool(config.get("attention_bias", False))
    return ModelShape(
        family="llama",
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or default_head,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        positions=config["max_position_embeddings"],
        tied=bool(config.get("tie_word_embeddings", False)),
        embed=hidden,
        qkv_bias=biased or kind == "qwen2",
        o_bias=biased,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )
