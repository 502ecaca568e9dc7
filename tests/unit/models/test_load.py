from __future__ import annotations

import json

import pytest
import torch
import transformers as tf

from rlhf_app.errors import ConfigError
from rlhf_app.models.limits import check_vocabulary, length_limit
from rlhf_app.models.load import (
    _warn_eager,
    eos_token_ids,
    generation_eos_ids,
    load_causal_lm,
    load_errors,
    model_max_length,
    resolve_dtype,
)
from rlhf_app.models.scalar_head import new_scalar_model

CPU = torch.device("cpu")


def opt(path, **changes):
    """An OPT with dropout everywhere; its layers keep the rates as plain numbers."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 40, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 32, "word_embed_proj_dim": 8,
        "dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5, "layerdrop": 0.5,
        "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
    } | changes  # fmt: skip
    model = tf.OPTForCausalLM(tf.OPTConfig(**settings))
    model.save_pretrained(path)
    return path


def load(path, **arguments):
    return load_causal_lm(str(path), dtype=torch.float32, device=CPU, **arguments)


def test_logits_equal_those_of_plain_transformers(tmp_path):
    path = opt(tmp_path / "m")
    ids = torch.arange(20)[None]
    expected = tf.AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits
    assert torch.equal(load(path).eval()(ids).logits, expected)


@pytest.mark.parametrize("build", [opt, "gpt2"])
def test_train_mode_is_deterministic_without_dropout(tmp_path, build):
    if build == "gpt2":
        path = tmp_path / "m"
        config = tf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        tf.GPT2LMHeadModel(config).save_pretrained(path)
    else:
        path = build(tmp_path / "m")
    model = load(path)
    assert model.training
    assert model.config.use_cache is False
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert torch.equal(model(ids).logits, model.eval()(ids).logits)
    # The check can fail: plain loading keeps the rates.
    plain = tf.AutoModelForCausalLM.from_pretrained(path).train()
    assert not torch.equal(plain(ids).logits, plain(ids).logits)


def test_gradient_checkpointing_changes_no_gradient(tmp_path):
    path = opt(tmp_path / "m")
    ids = torch.arange(20)[None]
    gradients = []
    for checkpointing in (False, True):
        model = load(path, gradient_checkpointing=checkpointing)
        assert model.is_gradient_checkpointing is checkpointing
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_dtype():
    cuda = torch.device("cuda")
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", cuda) == torch.bfloat16
    assert resolve_dtype("bf16", CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"model\.dtype fp16 needs a GPU"):
        resolve_dtype("fp16", CPU)


def test_loaded_dtype(tmp_path):
    model = load_causal_lm(str(opt(tmp_path / "m")), dtype=torch.bfloat16, device=CPU)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_such_directory(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "missing", setting="model.reward")
    assert one_line(error) == f"model.reward {tmp_path / 'missing'}: no such directory"


def test_directory_without_config(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path)
    assert "no config.json" in one_line(error)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "m").write_text("x")
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "m")
    assert "is a file" in one_line(error)


def test_directory_without_weights(tmp_path):
    path = opt(tmp_path / "m")
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as error:
        load(path)
    assert "no weights" in one_line(error)


def test_missing_weights_are_not_made_up(tmp_path):
    path = opt(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError) as error:
        load(path)
    assert "weights are not in the checkpoint (model.decoder.layers.2" in one_line(error)


@pytest.mark.parametrize("size", [0, 100, -50])
def test_truncated_weights(tmp_path, size):
    path = opt(tmp_path / "m")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ConfigError) as error:
        load(path)
    assert one_line(error).startswith(f"model.actor {path}: a weights file")
    assert "truncated" in one_line(error)


def test_a_config_of_another_vocabulary(tmp_path):
    path = opt(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 48}))
    with pytest.raises(ConfigError) as error:
        load(path)
    assert one_line(error).startswith(f"model.actor {path}: config.json does not match the weights")


def test_other_runtime_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="out of memory"), load_errors("m", "model.actor"):
        raise RuntimeError("out of memory")


def test_a_config_that_is_no_object(tmp_path):
    path = opt(tmp_path / "m")
    (path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert "config.json holds a JSON list, not an object" in one_line(error)


NO_SDPA = {
    "bloom": lambda: tf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=40, hidden_size=16, num_layers=2, num_heads=2, max_position_embeddings=32,
        attention_types=[[["global", "local"], 1]],
    ),
    "mamba": lambda: tf.MambaConfig(
        vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=2
    ),
    "mpt": lambda: tf.MptConfig(vocab_size=40, d_model=16, n_heads=2, n_layers=2, max_seq_len=32),
    "xglm": lambda: tf.XGLMConfig(
        vocab_size=40, d_model=16, ffn_dim=24, num_layers=2, attention_heads=2,
        max_position_embeddings=32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", NO_SDPA)
def test_models_without_sdpa_load_with_eager(tmp_path, caplog, family):
    torch.manual_seed(0)
    path = tmp_path / "m"
    tf.AutoModelForCausalLM.from_config(NO_SDPA[family]()).save_pretrained(path)
    ids = torch.arange(20)[None]
    expected = tf.AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits
    _warn_eager.cache_clear()
    with caplog.at_level("WARNING", logger="rlhf_app"):
        model = load(path)
        load(path)
    torch.testing.assert_close(model.eval()(ids).logits, expected)
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("rlhf_app")]
    assert warning.startswith(f"{family} models have no sdpa")
    # Reward models and critics load the trunk alone.
    trunk = new_scalar_model(str(path), dtype=torch.float32, device=CPU, seed=0)
    assert trunk.eval()(ids).shape == (1, 20)


def test_unknown_architecture(tmp_path):
    path = opt(tmp_path / "m")
    (path / "config.json").write_text('{"model_type": "no-such-family"}')
    with pytest.raises(ConfigError) as error:
        load(path)
    assert "no-such-family" in one_line(error)


def test_hub_out_of_reach(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as error:
        load("someone/no-such-model", setting="model.actor")
    assert one_line(error).startswith("model.actor someone/no-such-model (neither a directory")


def test_positions():
    assert model_max_length(tf.OPTConfig(max_position_embeddings=77)) == 77
    assert model_max_length(tf.GPT2Config(n_positions=78)) == 78
    assert model_max_length(tf.BloomConfig()) > 10**6


@pytest.mark.parametrize(("stored", "expected"), [(2, (2,)), ([2, 7], (2, 7)), (None, (2,))])
def test_eos_ids(tmp_path, stored, expected):
    path = opt(tmp_path / "m")
    model = load(path)
    model.generation_config.eos_token_id = stored
    assert eos_token_ids(model) == expected
    model.generation_config.save_pretrained(path)
    assert generation_eos_ids(str(path), model.config) == expected


def test_eos_ids_without_a_generation_config(tmp_path):
    path = opt(tmp_path / "m", eos_token_id=[2, 3])
    (path / "generation_config.json").unlink()
    assert generation_eos_ids(str(path), load(path).config) == (2, 3)


def test_length_limit():
    assert length_limit(None, 2048, "m") == 512
    assert length_limit(None, 128, "m") == 128
    assert length_limit(100, 128, "m") == 100
    with pytest.raises(ConfigError, match=r"data\.max_length 200 exceeds the 128 positions of m"):
        length_limit(200, 128, "m")


def test_ids_beyond_the_embedding_are_refused(tmp_path):
    model = load(opt(tmp_path / "m"))
    check_vocabulary(model, 39, "m")
    with pytest.raises(ConfigError, match="token id 40 but only 40 embeddings"):
        check_vocabulary(model, 40, "m")
