"""Which models get a plan, and why others do not."""

import functools

import pytest
import torch
import transformers as tf
from transformers.models.llama import modeling_llama

from rlhf_app.config.lora import LoraSettings
from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.fused.plan import DecoderPlan, read_plan
from rlhf_app.models.lora import attach

PLANNED = {
    "opt", "llama", "llama-mha", "llama3-rope", "linear-rope", "yarn-rope", "dynamic-rope",
    "qwen2", "qwen2-window", "qwen3", "mistral-window",
}  # fmt: skip


def test_exactly_these_families_have_plans(build, families):
    assert {name for name in families if isinstance(read_plan(build(name)), DecoderPlan)} == PLANNED


def test_a_plan_names_every_weight_once(build):
    for name in sorted(PLANNED):
        model = build(name)
        found = [p for m in read_plan(model).modules() for p in m.parameters()]
        assert len(found) == len({id(p) for p in found})
        assert {id(p) for p in found} == {id(p) for p in model.parameters()}


def test_plans_of_one_model_are_equal_and_of_two_are_not(build):
    model = build("qwen3")
    assert read_plan(model) == read_plan(model)
    assert read_plan(model) != read_plan(build("qwen3"))


def test_numbers_of_a_plan(build):
    layers = read_plan(build("qwen2-window")).layers
    assert [layer.window for layer in layers] == [None, 4, 4]
    assert {(x.heads, x.kv_heads, x.head_dim) for x in layers} == {(4, 2, 8)}
    opt = read_plan(build("opt"))
    assert (opt.positions.offset, opt.layers[0].activation, opt.layers[0].gate) == (2, "relu", None)


class _OwnLinear(torch.nn.Linear):
    pass


def _instance_forward(model):
    model.model.layers[1].mlp.forward = lambda x: x


def _wrapped_instance_forward(model):
    linear = model.model.layers[0].self_attn.o_proj
    own = linear.forward
    linear.forward = functools.wraps(own)(lambda x: 2 * own(x))


def _subclassed_linear(model):
    model.model.layers[0].mlp.up_proj.__class__ = _OwnLinear


def _own_model_class(model):
    model.__class__ = type("MyLlama", (tf.LlamaForCausalLM,), {})


def _half_precision_norm(model):
    model.model.norm.to(torch.bfloat16)


def _spectral_norm(model):
    torch.nn.utils.parametrizations.spectral_norm(model.model.layers[0].self_attn.q_proj)


def _sliced(model):
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = torch.nn.Parameter(linear.weight[:, :8])


def _gathered_elsewhere(model):
    model.model.embed_tokens.weight.data = torch.empty(0)


def _tensor_subclass(model):
    class Quantised(torch.nn.Parameter):
        pass

    weight = model.lm_head.weight
    model.lm_head._parameters["weight"] = weight.as_subclass(Quantised)


def _layers_left_out(model):
    model.config.num_hidden_layers = 2


def _shared_cache(model):
    model.model.layers[2].self_attn.layer_idx = 1


def _other_activation(model):
    model.model.layers[0].mlp.act_fn = tf.activations.ACT2FN["relu2"]


def _max_norm(model):
    model.model.embed_tokens.max_norm = 1.0


CHANGES = {
    "replaced forward of an MLP": (_instance_forward, "LlamaMLP has a replaced forward"),
    "wrapped forward of a linear": (_wrapped_instance_forward, "Linear has a replaced forward"),
    "another linear": (_subclassed_linear, "in the place of Linear"),
    "another model class": (_own_model_class, "MyLlama"),
    "hook of a layer": (
        lambda m: m.model.layers[0].register_forward_hook(lambda *_: None),
        "LlamaDecoderLayer has forward hooks",
    ),
    "hook before a norm": (
        lambda m: m.model.layers[0].input_layernorm.register_forward_pre_hook(lambda *_: None),
        "LlamaRMSNorm has forward hooks",
    ),
    "hook of the model": (
        lambda m: m.register_forward_hook(lambda *_: None),
        "LlamaForCausalLM has forward hooks",
    ),
    "training mode of a part": (
        lambda m: m.model.layers[0].self_attn.train(),
        "LlamaAttention is in training mode",
    ),
    "norms of another dtype": (_half_precision_norm, "several dtypes"),
    "another device": (lambda m: m.lm_head.to("meta"), "devices"),
    "parametrization": (_spectral_norm, "ParametrizedLinear"),
    "sliced weight": (_sliced, "not whole"),
    "weight elsewhere": (_gathered_elsewhere, "not whole"),
    "quantised weight": (_tensor_subclass, "Quantised"),
    "fewer layers than modules": (_layers_left_out, "3 layers where the config says 2"),
    "layers that share a cache": (_shared_cache, "layer 2 with the keys and values of 1"),
    "unknown activation": (_other_activation, "ReLUSquaredActivation"),
    "renormalised embedding": (_max_norm, "max_norm"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_not_understood_has_a_reason(change, build):
    alter, words = CHANGES[change]
    model = build("llama")
    assert isinstance(read_plan(model), DecoderPlan)
    alter(model)
    reason = read_plan(model)
    assert isinstance(reason, str)
    assert words in reason


def test_reasons_of_other_models(build):
    assert read_plan(build("opt-350m")) == "projected embeddings"
    post_norm = tf.OPTConfig(
        vocab_size=9, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=2,
        word_embed_proj_dim=8, do_layer_norm_before=False,
    )  # fmt: skip
    assert read_plan(tf.OPTForCausalLM(post_norm).eval()) == "no final norm"
    assert read_plan(build("gemma2")) == "no plan for a Gemma2ForCausalLM"
    assert read_plan(torch.nn.Linear(1, 1)) == "no plan for a Linear"


def test_forwards_patched_on_the_class_or_hooked_everywhere(build, monkeypatch):
    model = build("llama")
    own = modeling_llama.LlamaMLP.forward
    with monkeypatch.context() as patched:
        # As a decorator would: it looks like the original, which it wraps.
        patched.setattr(
            modeling_llama.LlamaMLP, "forward", functools.wraps(own)(lambda self, x: own(self, x))
        )
        assert read_plan(model) == "LlamaMLP has a replaced forward"
        # And inside a decorator of a library.
        patched.setattr(modeling_llama.LlamaMLP, "forward", torch.no_grad()(lambda self, x: x))
        assert read_plan(model) == "LlamaMLP has a replaced forward"
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert read_plan(model) == "forward hooks of all modules"
    finally:
        handle.remove()
    assert isinstance(read_plan(model), DecoderPlan)


def test_adapters_and_hooks_between_rollouts_are_noticed(build, prompts, hf_greedy):
    model = build("llama")
    generator = Generator(model)
    params = SamplingParams(8, greedy=True)
    plain = generator.rollout(prompts, params).tokens
    assert generator._model.fused.reason == ""
    seen = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert generator.rollout(prompts, params).tokens == plain
    assert seen
    assert "hooks" in generator._model.fused.reason
    handle.remove()
    assert generator.rollout(prompts, params).tokens == plain
    assert generator._model.fused.reason == ""
    attach(model, LoraSettings(rank=2), seed=0, base="none", setting="lora")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora" in name:
                weight.normal_(0, 0.3)
    adapted = generator.rollout(prompts, params).tokens
    assert generator._model.fused.reason == "Linear of peft in the place of Linear"
    assert adapted == hf_greedy(model, prompts, 8) != plain


def test_recorded_hidden_states_leave_no_trace(build, prompts):
    model = build("llama")
    states = model(torch.tensor([prompts[1]]), output_hidden_states=True).hidden_states
    assert len(states) == 4
    assert isinstance(read_plan(model), DecoderPlan)


def test_streamed_weights_and_autocast_run_the_module(build, prompts):
    model = build("llama")
    generator = Generator(model)
    with torch.autocast("cpu", torch.bfloat16):
        generator.rollout(prompts, SamplingParams(3))
    assert generator._model.fused.reason == "autocast"
    generator._model.weights.lockstep = True
    with generator._model.session():
        assert generator._model.fused.reason == "weights are gathered in every forward"
