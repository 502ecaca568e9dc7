"""Which products are split, and the kernels' arithmetic where Triton can interpret them.

`TRITON_INTERPRET=1 pytest` on this file runs the kernels on the CPU, where Triton is installed.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from rlhf_app.hybrid_engine.fused import split_k
from rlhf_app.hybrid_engine.fused.plan import Norm
from rlhf_app.hybrid_engine.fused.split_k import Partials, partial_product, splits_for, splits_of

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


def half_linear(inner, features, bias=True, dtype=torch.float16, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inner, features, bias=bias).to(dtype)


@pytest.mark.parametrize("rows", [16, 17, 32, 64])
@pytest.mark.parametrize(
    ("inner", "features", "splits"),
    [
        (2048, 2048, 4), (8192, 2048, 4), (4096, 4096, 2), (11_008, 4096, 2), (896, 896, 4),
        (4864, 896, 4),
    ],
)  # fmt: skip
def test_decode_steps_of_few_rows_are_split(rows, inner, features, splits):
    assert splits_for(rows, inner, features) == splits


@pytest.mark.parametrize(
    ("rows", "inner", "features"),
    [
        pytest.param(15, 2048, 2048, id="fewer rows"),
        pytest.param(65, 2048, 2048, id="more rows"),
        pytest.param(32, 2000, 2048, id="inner features with a tail"),
        pytest.param(32, 2048, 2000, id="output features with a tail"),
        pytest.param(32, 768, 2048, id="fewer inner features than were measured"),
        pytest.param(32, 2048, 768, id="fewer output features"),
        pytest.param(32, 2048, 5120, id="more output features"),
    ],
)
def test_other_products_are_not(rows, inner, features):
    assert splits_for(rows, inner, features) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_plain_half_precision_on_hopper_is_split(dtype, monkeypatch):
    linear = half_linear(2048, 2048, dtype=dtype)
    x = torch.zeros(32, 2048, dtype=dtype)
    assert splits_of(x, linear) is None  # on the CPU
    monkeypatch.setattr(split_k, "_measured", lambda _: True)
    assert splits_of(x, linear) == 4

    full = half_linear(2048, 2048, dtype=torch.float32)
    assert splits_of(x.float(), full) is None
    assert splits_of(x, full) is None
    assert splits_of(torch.zeros(32, 4096, dtype=dtype)[:, ::2], linear) is None
    flat = torch.zeros(2048 * 2048 + 1, dtype=dtype)
    linear.weight = nn.Parameter(flat[1:].view(2048, 2048))  # as in a flat buffer
    assert splits_of(x, linear) is None


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), False), ((9, 0), True), ((12, 0), False)]
)
def test_other_gpus_were_not_measured(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert split_k._measured(torch.device("cuda")) is expected
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm counts its GPUs otherwise
    assert not split_k._measured(torch.device("cuda"))


@interpreted
@pytest.mark.parametrize("rows", [16, 24, 64])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    ("inner", "splits", "parts"),
    [(256, 1, 1), (512, 4, 4), (896, 4, 4), (640, 4, 3)],
    ids=["whole", "even", "last-smaller", "fewer-than-asked"],
)
def test_partial_sums_add_up_to_the_product(rows, bias, inner, splits, parts):
    from rlhf_app.hybrid_engine.fused import triton_layers

    linear = half_linear(inner, 192, bias)
    x = torch.randn(rows, inner).half()

    got = partial_product(triton_layers, x, linear, splits)

    assert got.sums_SNE.shape == (parts, rows, 192)
    want = x.double() @ linear.weight.double().t()
    torch.testing.assert_close(got.sums_SNE.double().sum(0), want, rtol=1e-5, atol=1e-5)
    assert got.bias_E is linear.bias


@interpreted
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("added", ["nothing", "tensor", "partials", "partials-bias"])
def test_the_sum_is_normalised(kind, added):
    from rlhf_app.hybrid_engine.fused.ops_triton import TritonOps

    torch.manual_seed(0)
    module = nn.LayerNorm(96) if kind == "layer" else nn.RMSNorm(96, eps=1e-5)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x, bias, sums = torch.randn(5, 96), torch.randn(96), torch.randn(3, 5, 96)
    delta, total = {
        "nothing": (None, x),
        "tensor": (sums[0], x + sums[0]),
        "partials": (Partials(sums, None), x + sums.sum(0)),
        "partials-bias": (Partials(sums, bias), x + sums.sum(0) + bias),
    }[added]
    stream, out = TritonOps().residual_norm(x.clone(), delta, Norm(kind, module, 1e-5))

    torch.testing.assert_close(stream, total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, module(total), rtol=1e-5, atol=1e-5)


@interpreted
def test_the_product_is_rounded_with_its_bias_before_it_is_added():
    from rlhf_app.hybrid_engine.fused.ops_triton import TritonOps

    module = nn.RMSNorm(16).half()
    stream = torch.full((1, 16), 2048.0).half()  # where fp16 numbers are 2 apart
    # 1 + 2^-12 rounds to 1, and 2048 + 1 to the even 2048; unrounded the sum would give 2050.
    sums = torch.tensor([0.75, 0.25]).view(2, 1, 1).expand(2, 1, 16).contiguous()
    bias = torch.full((16,), 2.0**-12).half()

    got, _ = TritonOps().residual_norm(stream, Partials(sums, bias), Norm("rms", module, 1e-5))

    assert got.tolist() == [[2048.0] * 16]
