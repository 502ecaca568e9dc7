from __future__ import annotations

import json
import math

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from rlhf_app.errors import ConfigError
from rlhf_app.models.scalar_head import (
    RewardFacts,
    ScalarHead,
    ScoreStats,
    hidden_width,
    load_scalar_model,
    new_scalar_model,
    read_reward_facts,
    save_scalar_model,
)
from rlhf_app.training.distributed import Dist

CPU = torch.device("cpu")
DIST = Dist(0, 0, 1, CPU)
COMMON = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: tf.LlamaConfig(**COMMON, intermediate_size=24, num_key_value_heads=1),
    "opt": lambda: tf.OPTConfig(**COMMON, ffn_dim=24, word_embed_proj_dim=16),
    "opt-350m": lambda: tf.OPTConfig(
        **COMMON, ffn_dim=24, word_embed_proj_dim=8, do_layer_norm_before=False
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, pad_token_id=1
    ),
}
ROWS = [[5, 6, 7, 8, 2], [9, 10, 2], [11, 2]]


@pytest.fixture(params=FAMILIES)
def causal_dir(request, tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "causal"
    tf.AutoModelForCausalLM.from_config(FAMILIES[request.param]()).save_pretrained(path)
    return str(path)


@pytest.fixture
def llama_dir(tmp_path):
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(FAMILIES["llama"]()).save_pretrained(tmp_path / "causal")
    return str(tmp_path / "causal")


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<unk>": 0, "<pad>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 40)}}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


def new(path, seed=3, dtype=torch.float32):
    return new_scalar_model(path, dtype=dtype, device=CPU, seed=seed)


def load(path, dtype=torch.float32, **arguments):
    return load_scalar_model(str(path), dtype=dtype, device=CPU, **arguments)


def save(model, tokenizer, path, **facts):
    with torch.no_grad():
        model.head.bias.fill_(0.25)
    save_scalar_model(model, tokenizer, path, DIST, RewardFacts(**facts))
    return path


def padded(rows, pad=1):
    width = max(map(len, rows))
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows])


def last_scores(model, rows, pad=1):
    with torch.no_grad():
        values = model(padded(rows, pad))
    return torch.stack([values[i, len(row) - 1] for i, row in enumerate(rows)])


def test_trunk_is_the_causal_model_s(causal_dir):
    model = new(causal_dir)
    causal = tf.AutoModelForCausalLM.from_pretrained(causal_dir).eval()
    hidden = causal.base_model(padded(ROWS[:1])).last_hidden_state
    expected = hidden @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(padded(ROWS[:1])), expected.squeeze(-1))


def test_width_is_that_of_the_last_hidden_state():
    assert hidden_width(FAMILIES["opt-350m"]()) == 8
    assert hidden_width(FAMILIES["gpt2"]()) == 16


def test_spread_of_the_initial_head(tmp_path):
    wide = {"hidden_size": 1024, "num_hidden_layers": 1, "intermediate_size": 8}
    config = tf.LlamaConfig(**COMMON | wide)
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    weight = new(str(tmp_path / "wide")).head.weight
    # 1024 draws: their std is within 10 % of the true one (4.5 sigma).
    assert weight.std().item() == pytest.approx(1 / math.sqrt(1025), rel=0.1)
    assert abs(weight.mean().item()) < 4 / 1024


def test_head_is_drawn_from_the_seed_alone(llama_dir):
    torch.manual_seed(99)
    first = new(llama_dir)
    second, other = new(llama_dir), new(llama_dir, seed=4)
    assert torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)
    assert first.head.bias.item() == 0


def test_same_score_alone_batched_and_with_any_padding(causal_dir):
    model = new(causal_dir).eval()
    alone = torch.cat([last_scores(model, [row]) for row in ROWS])
    for pad in (0, 1, 2, 39):
        torch.testing.assert_close(last_scores(model, ROWS, pad), alone)


def test_head_computes_in_fp32(llama_dir):
    model = new(llama_dir, dtype=torch.bfloat16)
    hidden = torch.randn(3, 16).bfloat16()
    assert model.head.weight.dtype == torch.bfloat16
    value = model.head(hidden)
    assert value.dtype == torch.float32
    exact = hidden.double() @ model.head.weight.double().T
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_scores_come_back_exactly(causal_dir, tokenizer, tmp_path, dtype):
    model = new(causal_dir, dtype=dtype).eval()
    path = save(model, tokenizer, tmp_path / "reward")
    assert torch.equal(last_scores(load(path, dtype).eval(), ROWS), last_scores(model, ROWS))


def test_plain_transformers_loads_it_and_scores_alike_up_to_the_bias(
    causal_dir, tokenizer, tmp_path
):
    model = new(causal_dir).eval()
    path = save(model, tokenizer, tmp_path / "reward")
    theirs, info = tf.AutoModelForSequenceClassification.from_pretrained(
        path, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert set(info["unexpected_keys"]) == {"score.bias"}
    assert theirs.config.num_labels == 1
    assert theirs.config.architectures == [type(theirs).__name__]
    ids = padded(ROWS)
    logits = theirs.eval()(ids, attention_mask=(ids != 1).long()).logits.squeeze(-1)
    torch.testing.assert_close(logits + 0.25, last_scores(model, ROWS))
    assert tf.AutoTokenizer.from_pretrained(path)("w5 w6").input_ids == [5, 6]


def test_a_classifier_of_another_tool_loads_with_bias_0(llama_dir, tmp_path):
    config = FAMILIES["llama"]()
    config.num_labels = 1
    theirs = tf.AutoModelForSequenceClassification.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ids = padded(ROWS)
    logits = theirs(ids, attention_mask=(ids != 1).long()).logits.squeeze(-1)
    torch.testing.assert_close(last_scores(load(tmp_path / "theirs").eval(), ROWS), logits)
    assert read_reward_facts(str(tmp_path / "theirs")) == RewardFacts()


@pytest.mark.parametrize("key", ["score.weight", "score.bias"])
def test_a_missing_head_key_is_an_error(llama_dir, tokenizer, tmp_path, key):
    path = save(new(llama_dir), tokenizer, tmp_path / "reward")
    tensors = load_file(path / "model.safetensors")
    tensors.pop(key)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"no {key} in the checkpoint"):
        load(path, setting="model.reward")


def test_a_causal_model_is_no_reward_model(llama_dir):
    with pytest.raises(ConfigError, match=r"model.reward .*no score.weight"):
        load(llama_dir)


def test_a_classifier_with_two_labels_is_no_reward_model(tmp_path):
    config = FAMILIES["llama"]()
    config.num_labels = 2
    tf.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"shape \(2, 16\)"):
        load(tmp_path / "two")


def test_facts_come_back(llama_dir, tokenizer, tmp_path):
    facts = {
        "stats": ScoreStats(1.5, 2.5, 0.1), "pad_token_id": 1, "eos_token_ids": (2, 7),
        "chat_format": "plain", "tokenizer_hash": "abc",
    }  # fmt: skip
    path = save(new(llama_dir), tokenizer, tmp_path / "reward", **facts)
    assert read_reward_facts(str(path)) == RewardFacts(**facts)
    (path / "reward_config.json").write_text(json.dumps({"stats": {"mean": 1}}))
    with pytest.raises(ConfigError, match=r"reward_config\.json: not readable"):
        read_reward_facts(str(path))


def test_normalise():
    raw = torch.tensor([-100.0, 1.0, 2.0, 4.0, 100.0])
    stats = ScoreStats(mean=2.0, std=2.0, std_floor=0.01)
    assert stats.normalise(raw, 5.0).tolist() == [-5.0, -0.5, 0.0, 1.0, 5.0]
    flat = ScoreStats(mean=2.0, std=0.001, std_floor=0.5)
    assert flat.normalise(raw, 5.0).tolist() == [-5.0, -2.0, 0.0, 4.0, 5.0]


def test_head_gradient_flows_to_the_trunk(llama_dir):
    model = new(llama_dir)
    model(padded(ROWS)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert isinstance(model.head, ScalarHead)
