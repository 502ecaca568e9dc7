"""Parameter counts against models that transformers builds without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_app.models.shapes import (
    KNOWN_MODELS,
    ModelShape,
    model_positions,
    model_shape,
    shape_from_config,
)


def meta_config(name: str, shape: ModelShape) -> Any:
    """The transformers config that a table entry describes."""
    transformers = pytest.importorskip("transformers")
    common: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
    }
    if shape.family == "opt":
        return transformers.OPTConfig(
            **common,
            ffn_dim=shape.ffn,
            word_embed_proj_dim=shape.embed,
            do_layer_norm_before=shape.final_norm,
        )
    common |= {"num_key_value_heads": shape.kv_heads, "intermediate_size": shape.ffn}
    if "qwen2" in name:
        return transformers.Qwen2Config(**common)
    if "qwen3" in name:
        return transformers.Qwen3Config(**common, head_dim=shape.head_dim)
    return transformers.LlamaConfig(**common)


def meta_counts(config: Any) -> tuple[int, int]:
    """Parameters of the causal LM and of its backbone, tied ones once."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
        backbone = AutoModel.from_config(config)
    return (
        sum(p.numel() for p in whole.parameters()),
        sum(p.numel() for p in backbone.parameters()),
    )


@pytest.mark.parametrize(
    "name",
    [
        "facebook/opt-125m",
        "facebook/opt-350m",
        "facebook/opt-1.3b",
        "facebook/opt-30b",
        "meta-llama/llama-2-7b-hf",
        "meta-llama/llama-3.2-1b",
        "meta-llama/meta-llama-3-8b",
        "qwen/qwen2.5-0.5b",
        "qwen/qwen2.5-7b",
        "qwen/qwen3-0.6b",
        "qwen/qwen3-8b",
    ],
)
def test_table_counts_equal_the_real_models(name: str) -> None:
    shape = KNOWN_MODELS[name]
    counts = meta_counts(meta_config(name, shape))
    assert (shape.parameters, shape.backbone_parameters) == counts


# Published safetensors totals, for models that are slow to build even without memory.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-2-13b-hf", 13_015_864_320),
        ("meta-llama/Llama-2-70b-hf", 68_976_648_192),
        ("meta-llama/Meta-Llama-3-70B", 70_553_706_496),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen3-32B", 32_762_123_264),
    ],
)
def test_published_counts(name: str, parameters: int) -> None:
    shape = model_shape(name)
    assert shape is not None
    assert shape.parameters == parameters


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 24},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 8},
        {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 16},
    ],
)
def test_local_configs_equal_the_real_models(config: dict[str, Any]) -> None:
    from transformers import AutoConfig

    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    } | config
    shape = shape_from_config(values)
    assert shape is not None
    real = AutoConfig.for_model(**values)
    assert (shape.parameters, shape.backbone_parameters) == meta_counts(real)
    # What transformers itself writes reads back the same.
    assert shape_from_config(json.loads(real.to_json_string(use_diff=False))) == shape


def test_a_directory_tells_its_shape(model_dir: Path) -> None:
    shape = model_shape(str(model_dir))
    assert shape is not None
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (2, 1, 8)
    assert model_positions(str(model_dir)) == 128


@pytest.mark.parametrize(
    ("config", "positions"),
    [({"model_type": "gpt2", "n_positions": 99}, 99), ({"model_type": "bloom"}, None)],
)
def test_other_families_have_positions_but_no_shape(
    tmp_path: Path, config: dict[str, Any], positions: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_shape(str(tmp_path)) is None
    assert model_positions(str(tmp_path)) == positions


def test_hub_ids_in_any_case_and_unknown_ones() -> None:
    assert model_shape("Facebook/OPT-1.3b") == KNOWN_MODELS["facebook/opt-1.3b"]
    assert model_positions("facebook/opt-1.3b") == 2048
    assert model_shape("some/other") is None
    assert model_positions("some/other") is None
