"""Adapters attached, trained, merged and saved."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as tf
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from rlhf_app.config.schema import LoraSettings
from rlhf_app.errors import ConfigError
from rlhf_app.models.load import load_causal_lm
from rlhf_app.models.lora import attach, merge_state
from rlhf_app.models.scalar_head import (
    RewardFacts,
    ScoreStats,
    load_scalar_model,
    new_scalar_model,
    save_scalar_model,
)
from rlhf_app.training.distributed import Dist
from rlhf_app.training.saving import save_causal_lm

CPU = torch.device("cpu")
DIST = Dist(0, 0, 1, CPU)
IDS = torch.arange(3, 19).view(2, 8)
COMMON = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 1}
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(
        **COMMON, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        initializer_range=0.3, tie_word_embeddings=True,
    ),
    "gpt2": lambda: tf.GPT2Config(
        **COMMON, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3
    ),
    "opt-350m": lambda: tf.OPTConfig(
        **COMMON, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=8, do_layer_norm_before=False,
        init_std=0.3, dropout=0.0,
    ),
}  # fmt: skip
# Linear layers of each, counted by hand: attention, feed-forward, projections; no head.
# From 20 on peft shortens its list of names.
LAYERS = {"llama": 3 * 7, "gpt2": 2 * 4, "opt-350m": 2 * 6 + 2}
NAMES = {
    "llama": "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
    "gpt2": "c_attn, c_fc, c_proj",
    "opt-350m": "fc1, fc2, k_proj, out_proj, project_in, project_out, q_proj, v_proj",
}
FAMILIES = list(CONFIGS)


def build(family: str):
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()


def adapt(model, **settings):
    attach(model, LoraSettings(**{"rank": 4, **settings}), seed=5, base="base", setting="sft.lora")
    return model


def train_a_bit(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


@pytest.fixture
def tokenizer():
    fast = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "</s>": 2}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_adapters_change_no_bit_and_alone_are_trained(family):
    before = build(family)(IDS).logits
    model = adapt(build(family))
    assert torch.equal(model(IDS).logits, before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * LAYERS[family]
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert isinstance(model, tf.PreTrainedModel)


def test_adapters_do_not_depend_on_the_ranks_generator():
    states = []
    for rank in (0, 1):
        model = build("llama")
        torch.manual_seed(rank)
        expected = torch.rand(1)
        torch.manual_seed(rank)
        adapt(model)
        assert torch.rand(1) == expected  # nor does the rank's generator notice
        states.append(model.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    other = build("llama")
    attach(other, LoraSettings(rank=4), seed=6, base="base", setting="sft.lora")
    key = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert not torch.equal(other.state_dict()[key], states[0][key])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_that_matches_nothing_lists_the_layers(family):
    """DeepSpeed-Chat matches 0 layers off OPT and dies in backward."""
    with pytest.raises(
        ConfigError,
        match=rf"sft.lora.target_modules: no linear layer of this model is called "
        rf"'decoder.layers.'; its layers are {NAMES[family]} \(or all-linear\)",
    ):
        adapt(build(family), target_modules=["decoder.layers."])


def test_one_unknown_name_among_known_ones_is_an_error():
    with pytest.raises(ConfigError, match="is called 'query'"):
        adapt(build("llama"), target_modules=["q_proj", "query"])
    model = adapt(build("llama"), target_modules=["q_proj", "layers.1.mlp.up_proj"])
    assert sum(p.requires_grad for p in model.parameters()) == 2 * 4


def test_tied_and_adapted_models_are_refused():
    # The head is tied to the embedding, so a merged head would be the embedding as well.
    with pytest.raises(ConfigError, match="lm_head share one weight: leave lm_head out"):
        adapt(build("llama"), target_modules=["lm_head"])
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ConfigError, match=r"mlp.up_proj and .*mlp.up_proj share one weight"):
        adapt(model)
    with pytest.raises(ConfigError, match="adapters of its own"):
        adapt(adapt(build("llama")))


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_by_hand(family):
    """W + alpha/rank B A, and the same logits as with the adapter on."""
    model = train_a_bit(adapt(build(family), alpha=6.0))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    merged = merge_state(model, state)
    assert merged.keys() == build(family).state_dict().keys()
    for name in merged:
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A.default.weight" in state:
            a, b = (state[f"{stem}.lora_{x}.default.weight"].double() for x in "AB")
            delta = 1.5 * (b @ a)
            want = state[f"{stem}.base_layer.weight"] + (delta.T if family == "gpt2" else delta)
            assert torch.allclose(merged[name].double(), want, atol=1e-6)
    plain = build(family)
    plain.load_state_dict(merged)
    assert torch.allclose(plain(IDS).logits, model(IDS).logits, atol=1e-4)
    assert not torch.allclose(plain(IDS).logits, build(family)(IDS).logits, atol=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_merged_and_its_adapter_beside_it(family, tokenizer, tmp_path):
    build(family).save_pretrained(tmp_path / "base")
    model = train_a_bit(adapt(build(family)))
    want = model(IDS).logits
    state = {k: v.clone() for k, v in model.state_dict().items()}
    save_causal_lm(model, tokenizer, tmp_path / "out", DIST)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(loaded(IDS).logits, want, atol=1e-4)
    assert not any("lora" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    # The model in training is as it was.
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    base = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter")).eval()
    assert torch.equal(again(IDS).logits, want)
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32, "LORA")
    assert config["base_model_name_or_path"] == "base"


def test_an_adapters_directory_is_no_model(tokenizer, tmp_path):
    save_causal_lm(train_a_bit(adapt(build("llama"))), tokenizer, tmp_path / "out", DIST)
    with pytest.raises(ConfigError, match=r"model.actor .*adapter: holds a LoRA adapter; merge"):
        load_causal_lm(str(tmp_path / "out" / "adapter"), dtype=torch.float32, device=CPU)


def test_without_adapters_nothing_is_added(tokenizer, tmp_path):
    model = build("llama")
    save_causal_lm(model, tokenizer, tmp_path / "out", DIST)
    assert not (tmp_path / "out" / "adapter").exists()
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_reward_model_is_merged_and_its_adapter_beside_it(family, tokenizer, tmp_path):
    build(family).save_pretrained(tmp_path / "base")
    model = new_scalar_model(str(tmp_path / "base"), dtype=torch.float32, device=CPU, seed=0)
    adapt(model.backbone)
    assert model.head.weight.requires_grad  # the head trains with the adapters
    train_a_bit(model)
    torch.nn.init.constant_(model.head.bias, 0.25)
    want = model(IDS)
    save_scalar_model(model, tokenizer, tmp_path / "out", DIST, RewardFacts(ScoreStats(0.5, 2.0)))
    loaded = load_scalar_model(str(tmp_path / "out"), dtype=torch.float32, device=CPU)
    assert torch.allclose(loaded(IDS), want, atol=1e-4)
    if family == "opt-350m":
        return  # transformers' classifier is no such model: its score layer is too wide
    classifier = tf.AutoModelForSequenceClassification
    plain = classifier.from_pretrained(tmp_path / "out").eval()
    # transformers' class knows no bias of the head.
    assert torch.allclose(plain(IDS).logits[:, 0] + 0.25, want[:, -1], atol=1e-4)
    base = classifier.from_pretrained(tmp_path / "base", num_labels=1, pad_token_id=1)
    again = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter")).eval()
    assert torch.allclose(again(IDS).logits[:, 0] + 0.25, want[:, -1], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_gives_the_adapters_the_same_gradients(family, tmp_path):
    """With all of the base frozen, checkpointing that follows input gradients trains nothing."""
    build(family).save_pretrained(tmp_path)
    gradients = []
    for checkpointing in (False, True):
        model = load_causal_lm(
            str(tmp_path), dtype=torch.float32, device=CPU, gradient_checkpointing=checkpointing
        )
        train_a_bit(adapt(model))
        model(IDS, labels=IDS).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all(gradient.abs().sum() > 0 for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, atol=1e-6)


def test_the_base_is_found_from_any_directory(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build("llama").save_pretrained("base")
    model = build("llama")
    attach(model, LoraSettings(rank=4), seed=5, base="base", setting="sft.lora")
    save_causal_lm(model, tokenizer, tmp_path / "out", DIST)
    monkeypatch.chdir("/")
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    tf.AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
