"""Small models and prompts for tests on CUDA."""

from __future__ import annotations

import random
import socket

import pytest
import torch
import transformers as tf

from rlhf_app.training.distributed import close

VOCAB = 997
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "opt": lambda: tf.OPTConfig(**SHAPE, ffn_dim=256, word_embed_proj_dim=128, dropout=0.0),
    "llama": lambda: tf.LlamaConfig(
        **SHAPE, intermediate_size=256, num_key_value_heads=2, tie_word_embeddings=False
    ),
    "mistral-window": lambda: tf.MistralConfig(
        **SHAPE, intermediate_size=256, num_key_value_heads=2, sliding_window=9
    ),
    "gemma2": lambda: tf.Gemma2Config(
        **SHAPE, intermediate_size=256, num_key_value_heads=2, head_dim=32, sliding_window=9,
        query_pre_attn_scalar=32,
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_embd=128, n_layer=3, n_head=4, n_positions=256, bos_token_id=2,
        eos_token_id=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    ),
    "bloom": lambda: tf.BloomConfig(
        vocab_size=VOCAB, hidden_size=128, n_layer=3, n_head=4, bos_token_id=2, eos_token_id=2,
        hidden_dropout=0.0, attention_dropout=0.0,
    ),
    "mixtral": lambda: tf.MixtralConfig(
        **SHAPE, intermediate_size=128, num_key_value_heads=2, num_local_experts=4,
    ),
}  # fmt: skip


def build_model(family: str) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family]())
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.15)
    return model.eval()


@pytest.fixture
def build():
    return build_model


@pytest.fixture
def prompts() -> list[list[int]]:
    draw = random.Random(0)
    lengths = [1, 60, *(draw.randint(1, 60) for _ in range(30))]
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def _unused_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def single_process(monkeypatch):
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_unused_port()),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    # DeepSpeed's op builder cannot read an architecture such as 9.0a.
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    yield
    close()
