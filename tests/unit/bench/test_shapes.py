"""Known shapes have the dimensions, and the cost, of the models they are named after."""

import pytest
import torch
import transformers as tf

from rlhf_app.bench.limits import LayerCost
from rlhf_app.bench.model_cost import model_cost
from rlhf_app.bench.random_models import random_causal_lm, random_scalar_model
from rlhf_app.bench.shapes import NAMES, check_shape, config_of
from rlhf_app.errors import ConfigError
from rlhf_app.models.shapes import shape_from_config

# As published with the weights.
PUBLISHED = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "qwen-0.5b": 494_032_768,
    "qwen-7b": 7_615_616_512,
    "mistral-7b": 7_241_732_096,
}


def on_meta(config, auto_class=tf.AutoModelForCausalLM):
    with torch.device("meta"):
        return auto_class.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_parameters(name):
    config = config_of(name)
    parameters = sum(p.numel() for p in on_meta(config).parameters())
    assert parameters == shape_from_config(config.to_dict()).parameters
    assert parameters == PUBLISHED.get(name, parameters)


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"--shape opt-1b: unknown shape; .*opt-1\.3b.*tiny"):
        check_shape("opt-1b", "--shape")
    assert check_shape("OPT-1.3B", "--shape") == "opt-1.3b"


def test_the_cost_of_tied_embeddings():
    """The output embedding is read once; position rows are looked up."""
    cost = model_cost(on_meta(config_of("opt-1.3b")))
    assert cost.weight_bytes == 2 * (1_315_758_080 - 2050 * 2048)
    assert cost.head_weights == 50_272 * 2048
    assert cost.layer_weights == 24 * 12 * 2048**2
    assert cost.layers == (LayerCost(8192, 2048),) * 24


def test_the_cost_of_untied_embeddings_and_grouped_heads():
    """Llama-3.1-8B: 128,256 x 4096 input rows are looked up, 8 of 32 heads are stored."""
    cost = model_cost(on_meta(config_of("llama-8b")))
    assert cost.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert cost.layer_weights == 32 * (4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14_336)
    assert cost.layers == (LayerCost(2 * 8 * 128 * 2, 4096),) * 32


def test_the_cost_of_a_trunk():
    """OPT-350M has two projections between embeddings of 512 and states of 1024."""
    cost = model_cost(on_meta(config_of("opt-350m"), tf.AutoModel))
    assert cost.layer_weights == 24 * 12 * 1024**2 + 2 * 512 * 1024
    assert cost.head_weights == 0


def test_windows_are_those_of_the_layers():
    assert model_cost(on_meta(config_of("mistral-7b"))).layers[0].window == 4096
    config = tf.Qwen2Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, use_sliding_window=True, sliding_window=8,
        max_window_layers=1,
    )  # fmt: skip
    assert [layer.window for layer in model_cost(on_meta(config)).layers] == [None, 8, 8]


def test_random_models_are_ready_to_train_in_their_dtype():
    model = random_causal_lm(config_of("tiny"), torch.bfloat16, torch.device("cpu"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    logits = model(torch.arange(12)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.01  # neither zeros nor uninitialised memory
    reference = tf.AutoModelForCausalLM.from_config(config_of("tiny"))
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name].float(), buffer)


def test_a_critic_with_projected_embeddings_and_norms_at_the_end():
    config = config_of("opt-350m")
    config.update(
        {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "vocab_size": 50, "do_layer_norm_before": False}
    )  # fmt: skip
    model = random_scalar_model(config, torch.float32, torch.device("cpu"))
    assert model.head.weight.shape == (1, 16)
    values = model(torch.arange(8)[None])
    assert values.shape == (1, 8)
    assert torch.isfinite(values).all()
