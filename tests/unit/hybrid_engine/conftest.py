"""Tiny random models of many families, built in the test: nothing is downloaded."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import transformers as tf

VOCAB = 97
_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCAB, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "n_embd": 32, "n_layer": 3, "n_head": 4,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_OPT = {
    "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "dropout": 0.0, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_NEOX = {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}

_ALIBI = {"vocab_size": VOCAB, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2}
_FALCON = _ALIBI | {"num_hidden_layers": 3, "num_attention_heads": 4}


def _rope(**scaling: object) -> tf.PreTrainedConfig:
    """A Llama with 16 positions before its scaling."""
    return tf.LlamaConfig(
        **{**_LLAMA, "num_key_value_heads": 4},
        rope_parameters={
            "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, **scaling,
        },
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "opt": lambda: tf.OPTConfig(**_OPT, word_embed_proj_dim=32),
    "opt-350m": lambda: tf.OPTConfig(**_OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
    "gpt2": lambda: tf.GPT2Config(**_GPT2),
    "gpt2-inverse-layer-scale": lambda: tf.GPT2Config(
        **_GPT2, scale_attn_by_inverse_layer_idx=True
    ),
    "gptj": lambda: tf.GPTJConfig(**_GPT2, rotary_dim=4),
    "codegen": lambda: tf.CodeGenConfig(**_GPT2, rotary_dim=4),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**_NEOX),
    "llama": lambda: tf.LlamaConfig(**_LLAMA),
    "llama-mha": lambda: tf.LlamaConfig(**{**_LLAMA, "num_key_value_heads": 4}),
    "llama3-rope": lambda: _rope(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "linear-rope": lambda: _rope(rope_type="linear"),
    "yarn-rope": lambda: _rope(rope_type="yarn"),
    "dynamic-rope": lambda: tf.LlamaConfig(
        **{**_LLAMA, "max_position_embeddings": 16},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    ),
    "longrope": lambda: tf.Phi3Config(
        **_LLAMA, original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 6.0, 8.0],
        },
    ),
    "qwen2": lambda: tf.Qwen2Config(**_LLAMA),
    "qwen2-window": lambda: tf.Qwen2Config(
        **_LLAMA, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": lambda: tf.Qwen3Config(**_LLAMA, head_dim=8),
    "mistral-window": lambda: tf.MistralConfig(**_LLAMA, sliding_window=5),
    "gemma2": lambda: tf.Gemma2Config(
        **_LLAMA, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0,
        query_pre_attn_scalar=8, final_logit_softcapping=4.0,
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **_LLAMA, head_dim=8, sliding_window=5, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi": lambda: tf.PhiConfig(**_LLAMA),
    "phi3": lambda: tf.Phi3Config(**_LLAMA),
    "olmo2": lambda: tf.Olmo2Config(**_LLAMA),
    "smollm3": lambda: tf.SmolLM3Config(**_LLAMA),
    "mixtral": lambda: tf.MixtralConfig(
        **_LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "mixtral-eager-experts": lambda: tf.MixtralConfig(
        **_LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
        experts_implementation="eager",
    ),
    "qwen2-moe": lambda: tf.Qwen2MoeConfig(
        **_LLAMA, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=2,
    ),
    # One attention adapter each.
    "gpt-neo": lambda: tf.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=4, num_heads=4, max_position_embeddings=64,
        attention_types=[[["global", "local"], 2]], window_size=4, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    ),
    "bloom": lambda: tf.BloomConfig(**_ALIBI, n_layer=3, n_head=4),
    "bloom-6-heads": lambda: tf.BloomConfig(
        **{**_ALIBI, "hidden_size": 48}, n_layer=2, n_head=6,
        apply_residual_connection_post_layernorm=True,
    ),
    "falcon": lambda: tf.FalconConfig(**_FALCON, new_decoder_architecture=False),
    "falcon-alibi": lambda: tf.FalconConfig(
        **{**_FALCON, "num_attention_heads": 8}, alibi=True, multi_query=False,
        parallel_attn=False, bias=True, new_decoder_architecture=False,
    ),
    "falcon-gqa": lambda: tf.FalconConfig(
        **{**_FALCON, "num_attention_heads": 8}, new_decoder_architecture=True, num_kv_heads=2,
    ),
    # Outside the workspace: attention elsewhere, positions in the mask, or attention sinks.
    "mpt": lambda: tf.MptConfig(
        vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=64,
        eos_token_id=2, tie_word_embeddings=False,
    ),
    "gpt-oss": lambda: tf.GptOssConfig(
        **_LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4,
    ),
    # A state-space mixer beside each layer's attention; a forward that insists on a mask.
    "falcon-h1": lambda: tf.FalconH1Config(
        **_LLAMA, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1,
        mamba_d_state=8, mamba_d_conv=4, mamba_chunk_size=8,
    ),
    "xglm": lambda: tf.XGLMConfig(
        vocab_size=VOCAB, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4,
        max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    ),
    # Recurrent.
    "mamba": lambda: tf.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    ),
    "mamba2": lambda: tf.Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8,
        head_dim=8, n_groups=2, chunk_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    ),
    "rwkv": lambda: tf.RwkvConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32,
        intermediate_size=48, context_length=64, bos_token_id=1, eos_token_id=2,
    ),
    "recurrent-gemma": lambda: tf.RecurrentGemmaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, intermediate_size=96,
        num_attention_heads=4, lru_width=32, attention_window_size=6, num_key_value_heads=1,
    ),
    "qwen3-next": lambda: tf.Qwen3NextConfig(
        **{**_LLAMA, "num_hidden_layers": 4}, head_dim=8, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
    ),
}  # fmt: skip

Build = Callable[[str], tf.PreTrainedModel]


def build_model(family: str, seed: int = 0) -> tf.PreTrainedModel:
    """A fp32 model in eval mode whose weights are wide enough to make varied text."""
    torch.manual_seed(seed)
    # Some releases' sdpa drops the softcap in silence: eager is the true training forward.
    kind = "eager" if family == "gemma2" else None
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=kind)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.25)
            elif "bias" in name:
                weight.normal_(0, 0.1)
    return model.eval()


@pytest.fixture(scope="session")
def build() -> Build:
    """`build(family)` makes a fresh model."""
    return build_model


@pytest.fixture(scope="session")
def families() -> list[str]:
    """Every name that `build` knows."""
    return list(CONFIGS)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """24 ragged prompts of 1 to 12 tokens, free of special ids."""
    draw = random.Random(0)
    lengths = [1, 12, *(draw.randint(1, 12) for _ in range(22))]
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


Greedy = Callable[..., list[list[int]]]


@pytest.fixture(scope="session")
def hf_greedy() -> Greedy:
    """Greedy answers of transformers' own generate, left-padded, as long as nothing ends them."""

    def run(
        model: tf.PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int, **more: object
    ) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        kept, model.generation_config = model.generation_config, tf.GenerationConfig()
        try:
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **more
            )
        finally:
            model.generation_config = kept
        return out[:, longest:].tolist()

    return run


@pytest.fixture(scope="session")
def assert_same_greedy() -> Callable[..., None]:
    """Tokens equal; at most 1 % of rows may part, and only where two logits tie to 1e-4."""

    def check(
        model: tf.PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        got: list[list[int]],
        want: list[list[int]],
    ) -> None:
        different = [i for i in range(len(prompts)) if got[i] != want[i]]
        assert len(different) <= 0.01 * len(prompts), f"{len(different)} rows differ"
        for row in different:
            same = next(i for i, (a, b) in enumerate(zip(got[row], want[row])) if a != b)  # noqa: B905
            with torch.no_grad():
                ids = torch.tensor([[*prompts[row], *want[row][:same]]])
                top = model(ids).logits[0, -1].topk(2).values
            assert top[0] - top[1] < 1e-4
        assert len({token for row in want for token in row}) >= 8, "degenerate text"

    return check


@pytest.fixture(scope="session")
def uniform() -> Callable[[int, int, int, int], float]:
    """The uniform behind one token, on Python's unbounded integers: splitmix64 throughout."""
    golden, whole = 0x9E3779B97F4A7C15, 2**64

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % whole
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % whole
        return z ^ (z >> 31)

    def draw(seed: int, step: int, uid: int, index: int) -> float:
        rollout = mix((mix((seed + golden) % whole) + step) % whole)
        key = mix(rollout ^ mix((uid + golden) % whole))
        return (2 * (mix((key + (index + 1) * golden) % whole) >> 24) + 1) / 2**41

    return draw


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], object]:
    """`with warnings_of() as warned`: the engine's own warnings, once the block has ended."""

    @contextmanager
    def collect() -> Iterator[list[str]]:
        warned: list[str] = []
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="rlhf_app"):
            yield warned
        warned += [r.getMessage() for r in caplog.records if r.name.startswith("rlhf_app")]

    return collect
