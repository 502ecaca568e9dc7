"""The embedded default's base model: a small Llama with random weights."""

from __future__ import annotations

from pathlib import Path

from data_sources.embedded.tokenizer import build_tokenizer

HIDDEN_SIZE = 96
LAYERS = 2
HEADS = 4
POSITIONS = 128
# Large for such a narrow model: it makes copying words from the prompt quick to learn.
INITIALIZER_RANGE = 0.07


def build_base_model(directory: Path, seed: int) -> None:
    """Writes an untrained causal LM with its tokenizer and generation config.

    Args:
        directory: where `AutoModelForCausalLM.from_pretrained` will find it.
        seed: of the initial weights; the caller's random state is left as it was.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = build_tokenizer(directory)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=POSITIONS,
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
