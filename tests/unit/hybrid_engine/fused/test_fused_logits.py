"""The fused forward against transformers' own, logit by logit."""

import pytest
import torch
import transformers as tf

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.attention import Decode, Prefill
from rlhf_app.hybrid_engine.cpu_decode import CpuDecode
from rlhf_app.hybrid_engine.decode_step import COMPILED
from rlhf_app.hybrid_engine.fused import compiled
from rlhf_app.hybrid_engine.fused.compiled_decoder import CompiledDecoder
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace, LayerShape

VOCAB = 89
BASE = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GATED = BASE | {"intermediate_size": 56, "num_key_value_heads": 2}
OPT = BASE | {"ffn_dim": 72, "word_embed_proj_dim": 48, "dropout": 0.1, "attention_dropout": 0.1}


def _rope(kind, **more):
    rope = {"rope_type": kind, "rope_theta": 50.0, "factor": 4.0, **more}
    return tf.LlamaConfig(**GATED, rope_parameters=rope)


CONFIGS = {
    "opt-125m-like": tf.OPTConfig(**OPT, layerdrop=0.1),
    "opt-untied": tf.OPTConfig(**OPT, tie_word_embeddings=False),
    "opt-without-biases": tf.OPTConfig(**OPT, enable_bias=False),
    "galactica-like": tf.OPTConfig(**OPT, activation_function="gelu"),
    "opt-gelu-new": tf.OPTConfig(**OPT, activation_function="gelu_new"),
    "llama-gqa": tf.LlamaConfig(**GATED),
    "llama-tied": tf.LlamaConfig(**GATED, tie_word_embeddings=True),
    "llama-mqa-wide-heads": tf.LlamaConfig(**(GATED | {"num_key_value_heads": 1}), head_dim=20),
    "llama-with-biases": tf.LlamaConfig(**GATED, attention_bias=True, mlp_bias=True),
    "llama-gelu": tf.LlamaConfig(**GATED, hidden_act="gelu"),
    "rope-linear": _rope("linear"),
    "rope-llama3": _rope(
        "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24
    ),
    "rope-yarn": _rope("yarn", original_max_position_embeddings=24),
    "mistral-window": tf.MistralConfig(**GATED, sliding_window=7),
    "mistral-full": tf.MistralConfig(**GATED, sliding_window=None),
    "qwen2-tied": tf.Qwen2Config(**GATED, tie_word_embeddings=True),
    "qwen2-window": tf.Qwen2Config(
        **GATED, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": tf.Qwen3Config(**GATED, head_dim=16),
    "qwen3-with-biases": tf.Qwen3Config(**GATED, head_dim=8, attention_bias=True),
}
LENGTHS = [1, 11, 4, 8, *range(1, 12), *range(2, 6)]  # more rows than a vector's lanes
STEPS = 33


@pytest.fixture
def decoder_of():
    """`decoder_of(name)`: a random model in eval mode, its norms' weights and biases too."""

    def make(name, dtype=torch.float32):
        torch.manual_seed(3)
        model = tf.AutoModelForCausalLM.from_config(CONFIGS[name])
        with torch.no_grad():
            for parameter in model.parameters():
                spread, mean = (0.15, 0.0) if parameter.dim() > 1 else (0.2, 1.0)
                parameter.normal_(mean, spread)
        return model.to(dtype).eval()

    return make


def _rows():
    draw = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCAB, (len(LENGTHS), max(LENGTHS) + STEPS), generator=draw)


def _over_the_workspace(inference, rows, equal=False):
    """[B, 1 + STEPS, V]: a ragged prefill, then the given tokens one by one. Rows are in slots
    of their own number, where a step needs that; else in shuffled ones."""
    config = inference.model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    shapes = [LayerShape(kv_heads, size, size)] * config.num_hidden_layers
    workspace = KVWorkspace(shapes, inference.dtype, inference.device)
    workspace.borrow(*rows.shape)
    lengths = torch.tensor([max(LENGTHS)] * len(LENGTHS) if equal else LENGTHS)
    index = torch.arange(len(LENGTHS))
    kernels = inference.kernels
    slots = index if kernels is None else index.flip(0)
    with inference.session():
        assert inference.fused.reason == ""
        step = Prefill(workspace, slots)
        logits = [inference.prefill(rows[:, : max(LENGTHS)], lengths, step)]
        for number in range(STEPS):
            at = lengths + number
            step = Decode(workspace, at, max(LENGTHS) + number, equal=equal)
            if kernels is not None:
                step = CpuDecode(kernels, workspace, slots, at)
            logits.append(inference.decode(rows[index, at], at, step))
    return torch.stack(logits, 1), lengths


def _wanted(model, rows, lengths):
    with torch.no_grad():
        logits = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
    return torch.stack(
        [row[n - 1 : n + STEPS] for row, n in zip(logits, lengths.tolist(), strict=True)]
    )


@pytest.fixture
def kernels():
    """Compiled ones; a test that wants them is skipped where no compiler is."""
    if compiled.find_compiler() is None:
        pytest.skip("no C++ compiler")
    return compiled.load()


@pytest.mark.parametrize("way", ["ragged", "equal", "compiled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_the_training_forward(name, way, decoder_of, request):
    model = decoder_of(name)
    inference = InferenceModel(model)
    if way == "compiled":
        inference.kernels = request.getfixturevalue("kernels")
    got, lengths = _over_the_workspace(inference, _rows(), way == "equal")
    assert isinstance(inference.fused.used, CompiledDecoder) == (way == "compiled")
    want = _wanted(model, _rows(), lengths)
    assert want.std(-1).min() > 0.1, "degenerate logits"
    gap = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert gap.max() <= 1e-5


@pytest.mark.parametrize("name", ["opt-125m-like", "llama-gqa", "mistral-window", "qwen3"])
def test_bfloat16_is_as_near_to_exact_logits_as_the_training_forward(name, decoder_of):
    model = decoder_of(name, torch.bfloat16)
    got, lengths = _over_the_workspace(InferenceModel(model), _rows())
    own = _wanted(model, _rows(), lengths)
    exact = _wanted(model.double(), _rows(), lengths)
    error, noise = (got - exact).norm(), (own - exact).norm()
    assert got.dtype == torch.bfloat16
    assert 0 < error <= 1.25 * noise


@pytest.mark.parametrize("compile_decode", [False, True])
@pytest.mark.parametrize("name", ["opt-125m-like", "llama-gqa", "mistral-window", "qwen3"])
def test_rollouts_run_fused_and_follow_the_weights(
    name, compile_decode, decoder_of, prompts, hf_greedy
):
    if compile_decode and compiled.find_compiler() is None:
        pytest.skip("no C++ compiler")
    model = decoder_of(name)
    prompts = [[token % VOCAB or 3 for token in prompt] for prompt in prompts]
    generator = Generator(model, HybridEngineSettings(compile_decode=compile_decode))
    params = SamplingParams(20, greedy=True)
    assert generator.rollout(prompts, params, max_slots=5).tokens == hf_greedy(model, prompts, 20)
    # New storage for one weight, new values in place for another, another module for a third.
    with torch.no_grad():
        layer = (model.model.decoder if name.startswith("opt") else model.model).layers[1]
        query = layer.self_attn.q_proj
        query.weight = torch.nn.Parameter(query.weight.roll(1, 0))
        norm = layer.self_attn_layer_norm if name.startswith("opt") else layer.input_layernorm
        norm.weight.mul_(1.7)
        head = torch.nn.Linear(model.config.hidden_size, VOCAB)
        head.weight.copy_(model.lm_head.weight.roll(5, 0))
        model.lm_head = head
    again = generator.rollout(prompts, params, max_slots=5).tokens
    assert again == hf_greedy(model, prompts, 20)
    assert generator._model.fused.reason == ""
    assert (generator.form == COMPILED) == compile_decode


def test_a_norm_whose_eps_changes_between_rollouts_is_followed(decoder_of, prompts, hf_greedy):
    model = decoder_of("llama-gqa")
    prompts = [[token % VOCAB or 3 for token in prompt] for prompt in prompts]
    generator = Generator(model)
    params = SamplingParams(12, greedy=True)
    before = generator.rollout(prompts, params).tokens
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 5.0
    after = generator.rollout(prompts, params).tokens
    assert after == hf_greedy(model, prompts, 12) != before


def test_a_decoder_that_computes_something_else_is_not_used(
    decoder_of, prompts, hf_greedy, monkeypatch
):
    from rlhf_app.hybrid_engine.fused import choice
    from rlhf_app.hybrid_engine.fused.ops_torch import TorchOps

    class Wrong(TorchOps):
        def mlp(self, y_NE, layer):
            return -super().mlp(y_NE, layer)

    monkeypatch.setattr(choice, "ops_for", lambda *_: Wrong())
    model = decoder_of("llama-gqa")
    prompts = [[token % VOCAB or 3 for token in prompt] for prompt in prompts]
    generator = Generator(model)
    got = generator.rollout(prompts, SamplingParams(12, greedy=True)).tokens
    assert "differ" in generator._model.fused.reason
    assert got == hf_greedy(model, prompts, 12)
