from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.sampling import SamplingParams
from rlhf_app.hybrid_engine.tensor_parallel import SlicedWeights
from rlhf_app.hybrid_engine.tp_group import RankGroup, RankRequest, merged
from rlhf_app.hybrid_engine.tp_plans import NotSliceable, slicing_plan
from rlhf_app.hybrid_engine.weights import ResidentWeights


def sliced(model, rank, ranks=2):
    """A rank's weights, alone in this process: partial sums stay partial."""
    group = SimpleNamespace(size=ranks, rank=rank, sum=lambda partial: partial)
    return SlicedWeights(model, slicing_plan(model, ranks), group, ResidentWeights(), 8)


def test_fused_qkv_is_cut_in_each_of_its_parts(build):
    model = build("gpt2")
    whole = model.transformer.h[0].attn.c_attn.weight.detach()  # [in, q + k + v]
    bias = model.transformer.h[0].attn.c_attn.bias.detach()
    for rank in range(2):
        head = slice(16 * rank, 16 * rank + 16)
        with sliced(model, rank).available():
            layer = model.transformer.h[0].attn.c_attn
            want = [part[:, head] for part in (whole[:, :32], whole[:, 32:64], whole[:, 64:])]
            assert torch.equal(layer.weight, torch.cat(want, dim=1))
            want = [part[head] for part in (bias[:32], bias[32:64], bias[64:])]
            assert torch.equal(layer.bias, torch.cat(want))
            assert model.transformer.h[0].attn.split_size == 16


def test_packed_projections_with_grouped_heads(build):
    """Phi-3: 4 heads of queries, 2 of keys and of values, 8 wide; gate beside up."""
    model = build("phi3")
    layer = model.model.layers[1]
    qkv, gate_up = layer.self_attn.qkv_proj.weight, layer.mlp.gate_up_proj.weight
    q, k, v = qkv[:32], qkv[32:48], qkv[48:]
    gate, up = gate_up[:48], gate_up[48:]
    with sliced(model, 1).available():
        got = layer.self_attn.qkv_proj.weight
        assert torch.equal(got, torch.cat([q[16:], k[8:], v[8:]]))
        assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat([gate[24:], up[24:]]))
        assert layer.self_attn.num_key_value_heads == 1
        assert layer.self_attn.config.num_attention_heads == 2
        # The rest of the config is read through, when it is asked for.
        assert layer.self_attn.config._attn_implementation == model.config._attn_implementation
        assert model.config.num_attention_heads == 4
    assert layer.self_attn.config is model.config


@pytest.mark.parametrize(
    ("family", "column", "row", "once"),
    [
        ("opt", ["q_proj", "k_proj", "v_proj", "fc1"], ["out_proj", "fc2"], ["out_proj", "fc2"]),
        ("qwen2", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], ["o_proj", "down_proj"],
         []),
        ("gpt-neox", ["query_key_value", "dense_h_to_4h"], ["dense", "dense_4h_to_h"],
         ["dense", "dense_4h_to_h"]),
        ("olmo2", ["gate_proj", "up_proj"], ["down_proj"], []),
    ],
)  # fmt: skip
def test_layers_of_a_plan(build, family, column, row, once):
    plan = slicing_plan(build(family), 2)
    by_dim = [set(), set()]
    for cut in plan.cuts.values():
        if cut.name == "weight":
            by_dim[cut.dim].add(cut.module.rpartition(".")[2])
    assert by_dim == [set(column), set(row)]
    assert {path.rpartition(".")[2] for path in plan.reduced} == set(row)
    assert len(plan.reduced) == 3 * len(row)
    assert {path.split(".")[-2] for path in plan.once} == set(once)


def test_slices_are_views_of_weights_that_are_whole(build):
    model = build("llama")
    weights = sliced(model, 1)
    assert weights.copied_bytes == 0
    stored = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with weights.available():
        for module in model.modules():
            for weight in module._parameters.values():
                assert weight is None or weight.untyped_storage().data_ptr() in stored


def test_a_bias_behind_a_sum_is_the_first_ranks(build):
    model = build("opt")
    layer = model.model.decoder.layers[0]
    kept = layer.fc2.bias
    with sliced(model, 0).available():
        assert layer.fc2.bias is kept
    with sliced(model, 1).available():
        assert layer.fc2.bias.shape == kept.shape
        assert not layer.fc2.bias.any()
    assert layer.fc2.bias is kept


def test_everything_is_put_back_after_an_exception(build):
    model = build("opt")

    def state():
        parameters = [(n, id(p)) for m in model.modules() for n, p in m._parameters.items()]
        heads = [layer.self_attn.num_heads for layer in model.model.decoder.layers]
        return parameters, heads, [len(m._forward_hooks) for m in model.modules()]

    before = state()
    weights = sliced(model, 0)
    with weights.available():
        inside = state()
        with weights.available():  # nests
            assert state() == inside
    assert inside[1] == [2, 2, 2]
    with pytest.raises(KeyError), weights.available():
        raise KeyError
    assert state() == before
    assert all(b != a for a, b in zip(before[1:], inside[1:], strict=True))


def _one_kv_head(build):
    config = build("llama").config
    config.num_key_value_heads = 1
    return tf.LlamaForCausalLM(config)


def _odd_width(build):
    config = build("llama").config
    config.intermediate_size = 49
    return tf.LlamaForCausalLM(config)


def _adapted(build):
    return inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), build("llama"))


def _wrapped(build):
    class Quantised(nn.Linear):
        pass

    model = build("llama")
    model.model.layers[2].mlp.up_proj = Quantised(32, 48, bias=False)
    return model


def _strange_style(build):
    model = build("llama")
    model._tp_plan = {**model._tp_plan, "model.norm": "sequence_parallel"}
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_one_kv_head, "4 attention and 1 key-value heads do not divide by 2"),
        (_odd_width, r"mlp.gate_proj.weight of width 49 does not divide by 2"),
        (_adapted, "LoRA"),
        (_wrapped, r"layers.2.mlp.up_proj is a Quantised"),
        (_strange_style, "'sequence_parallel' at model.norm"),
        (lambda build: build("bloom"), "no tensor-parallel plan"),
        (lambda build: build("gpt-oss"), "no tensor-parallel plan"),
    ],
)
def test_reasons_not_to_slice(build, make, reason):
    with pytest.raises(NotSliceable, match=reason):
        slicing_plan(make(build), 2)


@pytest.mark.parametrize(
    ("slots", "rooms", "want"),
    [((3, 2), (None, None), 5), ((3, 2), (9, 7), 5), ((300, 200), (90, 70), 70)],
)
def test_rows_at_once_are_bounded_by_the_fullest_rank(slots, rooms, want):
    params = SamplingParams(4)
    requests = [
        RankRequest([[5], [6, 7]][:n], [11, 12][:n], params, [3, 4][:n], slot, room)
        for n, slot, room in zip((1, 2), slots, rooms, strict=True)
    ]
    got = merged(requests)
    assert (got.prompts, got.keys, got.slots) == ([[5], [5], [6, 7]], [11, 11, 12], want)
    assert got.limits == [3, 3, 4]


def test_a_group_needs_its_processes():
    with pytest.raises(ConfigError, match=r"inference_tp_size is 2.* the 1 processes"):
        RankGroup(2)
