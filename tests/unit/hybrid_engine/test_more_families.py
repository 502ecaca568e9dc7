"""Families that nobody asked about: whatever the probe accepts must be right."""

import pytest
import torch
import transformers as tf

from rlhf_app.hybrid_engine import Generator, SamplingParams

_COMMON = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOW = {"sliding_window": 5}
FAMILIES = {
    "apertus": {}, "arcee": {}, "bitnet": {}, "cohere": {}, "ernie4_5": {}, "nanochat": {},
    "nemotron": {}, "olmo": {}, "persimmon": {}, "stablelm": {},
    "cohere2": _WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "deepseek_v3": {
        "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "exaone4": _WINDOW,
    "gemma": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gpt_bigcode": {
        "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "resid_pdrop": 0.0,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "vocab_size": 97,
    },
    "granite": {
        "attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 2.0,
        "logits_scaling": 3.0,
    },
    "granitemoe": _LOCAL_EXPERTS,
    "hunyuan_v1_dense": {"head_dim": 8},
    "olmo3": _WINDOW,
    "olmoe": _EXPERTS,
    "phimoe": _LOCAL_EXPERTS,
    "qwen3_moe": _EXPERTS | {"moe_intermediate_size": 16, "head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "starcoder2": _WINDOW,
    "vaultgemma": _WINDOW | {
        "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0,
    },
    # Half of their layers look elsewhere: these are to fall back.
    "minimax": {"num_local_experts": 2},
    "llama4_text": {
        "attention_chunk_size": 5, "intermediate_size_mlp": 48, "num_local_experts": 2,
        "head_dim": 8,
    },
    "diffllama": {},
    "doge": {},
}  # fmt: skip
NATIVE = {"minimax", "llama4_text", "diffllama", "doge"}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_probe_accepts_follows_the_training_forward(family, prompts):
    if family not in tf.CONFIG_MAPPING:
        pytest.skip(f"transformers {tf.__version__} has no {family}")
    extras = FAMILIES[family]
    if "layer_types" in extras:
        extras = {**extras, "layer_types": extras["layer_types"][:3]}
    config = tf.AutoConfig.for_model(family, **{**_COMMON, **extras})
    torch.manual_seed(0)
    kind = "eager" if "attn_logit_softcapping" in extras else None
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=kind).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.25)
            elif "bias" in name:
                weight.normal_(0, 0.1)
    generator = Generator(model)
    prompts = prompts[:10]
    for params in (SamplingParams(12, seed=4), SamplingParams(12, greedy=True)):
        rollout = generator.rollout(prompts, params, max_slots=4)
        rows = zip(prompts, rollout.tokens, rollout.logprobs, strict=True)
        for prompt, answer, logprobs in rows:
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *answer]])
                want = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            taken = want[torch.arange(len(answer)), answer]
            torch.testing.assert_close(logprobs, taken, atol=1e-4, rtol=0)
            assert not params.greedy or (want.max(-1).values - taken < 1e-4).all()
    assert (generator.capability.missing is None) == (family not in NATIVE)
