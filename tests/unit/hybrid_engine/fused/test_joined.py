"""Weights of sibling projections side by side: the same values, read as one matrix."""

import pytest
import torch
from torch import nn

from rlhf_app.config.schema import HybridEngineSettings, PolicySettings
from rlhf_app.hybrid_engine.fused.joined import adjoining_sets, join_storage, joined
from rlhf_app.hybrid_engine.fused.ops_torch import TorchOps
from rlhf_app.hybrid_engine.fused.ops_triton import TritonOps
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import close, setup

IDS = torch.arange(3, 12)[None]


def qkv(model):
    """Query, key and value of the first layer."""
    layer = next(module for module in model.modules() if hasattr(module, "q_proj"))
    return layer.q_proj, layer.k_proj, layer.v_proj


@pytest.mark.parametrize(("family", "each"), [("opt", 1), ("llama", 2), ("qwen2", 2)], ids=str)
def test_siblings_become_one_matrix(build, family, each):
    model = build(family).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {name: id(parameter) for name, parameter in model.named_parameters()}
    expected = model(IDS).logits

    # Of every layer query, key and value; gate and up where there is a gate.
    assert join_storage(model) == each * model.config.num_hidden_layers
    assert join_storage(model) == 0

    assert {name: id(parameter) for name, parameter in model.named_parameters()} == objects
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(IDS).logits, expected)
    whole = joined(qkv(model))
    assert whole is not None
    assert torch.equal(whole.weight, torch.cat([linear.weight for linear in qkv(model)]))
    assert whole.weight.data_ptr() == qkv(model)[0].weight.data_ptr()  # a view, no copy


@pytest.mark.parametrize("family", ["opt", "llama", "qwen2"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["qkv", "vqk"])
def test_one_product_gives_each_its_own(build, family, order):
    model = build(family)
    join_storage(model)
    linears = tuple(qkv(model)[i] for i in order)
    y = torch.randn(5, linears[0].in_features)

    together = TritonOps().project(y, linears)

    for got, want in zip(together, TorchOps().project(y, linears), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "stage", "decay"),
    [
        (torch.float32, 0, 0.0),
        (torch.float32, 2, 0.1),
        (torch.bfloat16, 1, 0.0),
        (torch.bfloat16, 2, 0.1),
    ],
)
def test_training_keeps_them_so(build, dtype, stage, decay):
    dist = setup()
    try:
        settings = PolicySettings(learning_rate=1e-2, zero_stage=stage, weight_decay=decay)
        engine = engine_for(
            build("opt").to(dtype), settings, dtype=dtype, micro_batch_size=1, total_steps=4,
            dist=dist, hybrid=HybridEngineSettings(),
        )  # fmt: skip
        old = qkv(engine.module)[0].weight.detach().clone()
        for _ in range(2):
            engine.backward(engine(IDS, labels=IDS).loss)
            engine.step()

        whole = joined(qkv(engine.module))

        assert whole is not None
        assert not torch.equal(qkv(engine.module)[0].weight, old)
        assert torch.equal(whole.weight, torch.cat([x.weight for x in qkv(engine.module)]))
        assert torch.equal(whole.bias, torch.cat([x.bias for x in qkv(engine.module)]))
    finally:
        close()


def test_a_weight_that_moved_is_not_read_where_it_was(build):
    model = build("opt")
    join_storage(model)
    query, key, value = qkv(model)
    key.weight.data = key.weight.data.clone()

    assert joined((query, key, value)) is None
    assert joined((query, value)) is None  # there is a hole between them now


def test_a_bias_alone_elsewhere_is_enough(build):
    model = build("opt")
    join_storage(model)
    linears = qkv(model)
    linears[1].bias.data = linears[1].bias.data.clone()

    assert joined(linears) is None


def _tie(query, key, value):
    key.weight.data = query.weight.data  # two parameters over one memory


def _flatten(query, key, value):
    flat = torch.cat([value.weight.detach().flatten(), torch.zeros(7)])
    value.weight.data = flat[:-7].view_as(value.weight)  # part of somebody's buffer


@pytest.mark.parametrize("share", [_tie, _flatten])
def test_shared_memory_stays(build, share):
    model = build("opt")
    share(*qkv(model))
    places = [linear.weight.data_ptr() for linear in qkv(model)]

    join_storage(model)

    assert [linear.weight.data_ptr() for linear in qkv(model)] == places
    assert joined(qkv(model)) is None


def test_some_siblings_with_bias_some_without():
    block = nn.Module()
    block.q_proj, block.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)
    block.v_proj = nn.Linear(4, 4, bias=False)

    assert join_storage(block) == 0
    assert joined((block.q_proj, block.k_proj, block.v_proj)) is None


def test_order_only_moves_siblings_together(build):
    model = build("opt")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = [p for n, p in model.named_parameters() if "layers.1" not in n]

    sets = adjoining_sets(model, trained)
    ordered = [names[id(p)] for together in sets for p in together]

    assert sorted(ordered) == sorted(names[id(p)] for p in trained)
    start = next(i for i, name in enumerate(ordered) if name.endswith("q_proj.weight"))
    assert sum(len(together) > 1 for together in sets) == model.config.num_hidden_layers - 1
    found = [name.split("self_attn.")[1] for name in ordered[start : start + 6]]
    assert found == [f"{x}_proj.{kind}" for kind in ("weight", "bias") for x in "qkv"]


def test_a_projection_that_two_layers_share_stays(build):
    model = build("opt")
    first, second = [module for module in model.modules() if hasattr(module, "q_proj")][:2]
    second.q_proj.weight = first.q_proj.weight
    place = first.q_proj.weight.data_ptr()

    join_storage(model)

    assert first.q_proj.weight.data_ptr() == second.q_proj.weight.data_ptr() == place


def test_memory_that_other_processes_see_stays(build):
    model = build("opt").share_memory()
    places = [parameter.data_ptr() for parameter in model.parameters()]

    assert join_storage(model) == 0

    assert [parameter.data_ptr() for parameter in model.parameters()] == places
