"""The Triton operations of fused decoders against plain torch in fp64, and whole decoders."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton", reason="the operations are written in Triton")

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.attention import Decode
from rlhf_app.hybrid_engine.fused import ops_triton
from rlhf_app.hybrid_engine.fused.decoder import FusedDecoder
from rlhf_app.hybrid_engine.fused.joined import join_storage
from rlhf_app.hybrid_engine.fused.ops_torch import TorchOps
from rlhf_app.hybrid_engine.fused.ops_triton import TritonOps
from rlhf_app.hybrid_engine.fused.plan import Norm, read_plan
from rlhf_app.hybrid_engine.fused.split_k import Partials, partial_product
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace, LayerShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*shape, dtype=torch.float32, seed=0):
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=draw, device="cuda").to(dtype)


def norm_of(kind, size, dtype):
    module = nn.LayerNorm(size) if kind == "layer" else LlamaRMSNorm(size)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return Norm(kind, module.to("cuda", dtype), 1e-5)


def near(got, want, dtype):
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2), error


def layer_norm_64(x, norm):
    module = norm.module
    if norm.kind == "rms":
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        return x * module.weight.double()
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + norm.eps).sqrt()
    return x * module.weight.double() + module.bias.double()


@DTYPES
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("size", [96, 896, 2048, 7168])
@pytest.mark.parametrize("added", [True, False])
def test_residual_norm(dtype, kind, size, added):
    norm = norm_of(kind, size, dtype)
    x, delta = random(33, size, dtype=dtype), random(33, size, dtype=dtype, seed=1)
    total = x.double() + delta.double() if added else x.double()

    stream, out = TritonOps().residual_norm(x.clone(), delta if added else None, norm)

    near(stream, total, dtype)
    near(out, layer_norm_64(stream.double(), norm), dtype)


HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])

HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="only measured on Hopper",
)


def linear_of(inner, features, bias, dtype):
    torch.manual_seed(0)
    return nn.Linear(inner, features, bias=bias).to("cuda", dtype)


def product_64(x, linear):
    out = x.double() @ linear.weight.double().t()
    return out if linear.bias is None else out + linear.bias.double()


@HALF
@BIAS
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("rows", [16, 24, 32, 64])
@pytest.mark.parametrize(("inner", "features"), [(2048, 2048), (8192, 2048), (4096, 4096)])
@HOPPER
def test_split_products_reach_the_residual_stream(dtype, bias, kind, rows, inner, features):
    linear, norm = linear_of(inner, features, bias, dtype), norm_of(kind, features, dtype)
    x, start = random(rows, inner, dtype=dtype), random(rows, features, dtype=dtype, seed=1)
    ops = TritonOps()

    delta = ops.residual_linear(x, linear)
    stream, out = ops.residual_norm(start.clone(), delta, norm)

    assert isinstance(delta, Partials)
    near(stream, start.double() + product_64(x, linear), dtype)
    near(out, layer_norm_64(stream.double(), norm), dtype)


@HALF
@BIAS
@pytest.mark.parametrize("rows", [1, 16, 24, 64])
@pytest.mark.parametrize(
    ("inner", "features", "splits"),
    [
        pytest.param(896, 896, 4, id="last-smaller"),  # 2, 2, 2 and 1 of 7 blocks
        pytest.param(640, 896, 4, id="fewer-than-asked"),  # 2, 2 and 1 of 5
        pytest.param(256, 7168, 1, id="whole"),
    ],
)
def test_splits_with_tails_add_up(dtype, bias, rows, inner, features, splits):
    linear = linear_of(inner, features, bias, dtype)
    norm = norm_of("rms", features, dtype)
    x, start = random(rows, inner, dtype=dtype), random(rows, features, dtype=dtype, seed=1)

    delta = partial_product(ops_triton._kernels(), x, linear, splits)
    stream, out = TritonOps().residual_norm(start.clone(), delta, norm)

    plain = product_64(x, linear) - (0 if linear.bias is None else linear.bias.double())
    # Sums in fp32: far closer than what is rounded to half precision.
    near(delta.sums_SNE.sum(0), plain, torch.float32)
    near(stream, start.double() + product_64(x, linear), dtype)
    near(out, layer_norm_64(stream.double(), norm), dtype)


def test_split_products_are_rounded_before_they_are_added():
    stream = torch.full((1, 16), 256.0, device="cuda", dtype=torch.bfloat16)  # numbers 2 apart
    # 1 + 2^-9 rounds to 1, and 256 + 1 to the even 256; unrounded the sum would give 258.
    sums = torch.tensor([0.75, 0.25], device="cuda").view(2, 1, 1).expand(2, 1, 16).contiguous()
    bias = torch.full((16,), 2.0**-9, device="cuda", dtype=torch.bfloat16)

    got, _ = TritonOps().residual_norm(
        stream, Partials(sums, bias), norm_of("rms", 16, torch.bfloat16)
    )

    assert got.tolist() == [[256.0] * 16]


@pytest.mark.parametrize("rows", [1, 15, 65, 700])
def test_other_counts_of_rows_stay_with_cublas(rows):
    linear = linear_of(2048, 2048, True, torch.bfloat16)
    x = random(rows, 2048, dtype=torch.bfloat16)

    got = TritonOps().residual_linear(x, linear)

    assert torch.equal(got, nn.functional.linear(x, linear.weight, linear.bias))


@HOPPER
def test_split_products_follow_their_operands_in_a_captured_graph():
    dtype = torch.bfloat16
    linear, norm = linear_of(2048, 2048, True, dtype), norm_of("layer", 2048, dtype)
    x, stream = random(32, 2048, dtype=dtype), random(32, 2048, dtype=dtype, seed=1)
    ops = TritonOps()

    def step():
        return ops.residual_norm(stream, ops.residual_linear(x, linear), norm)[1]

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = step()
    for seed in (2, 3):
        start = random(32, 2048, dtype=dtype, seed=seed)
        stream.copy_(start)
        x.copy_(random(32, 2048, dtype=dtype, seed=seed + 10))
        with torch.no_grad():
            linear.weight.mul_(-0.5)  # in place, as an optimizer does
        graph.replay()
        near(stream, start.double() + product_64(x, linear), dtype)
        near(out, layer_norm_64(stream.double(), norm), dtype)


@HOPPER
@pytest.mark.parametrize("rows", [16, 24, 64])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_whole_decoders_with_split_products(family, rows):
    shape = {
        "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "vocab_size": 997,
        "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    }  # fmt: skip
    if family == "opt":
        config = tf.OPTConfig(**shape, ffn_dim=2048, word_embed_proj_dim=1024, dropout=0.0)
    else:
        config = tf.LlamaConfig(**shape, intermediate_size=2048, num_key_value_heads=4)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval().to("cuda", torch.bfloat16)
    exact = copy.deepcopy(model).float()
    plan = read_plan(model)
    layers = [LayerShape(layer.kv_heads, layer.head_dim, layer.head_dim) for layer in plan.layers]
    ids = (torch.arange(rows * 3, device="cuda").view(rows, 3) * 7 + 3) % 997

    def errors(ops):
        workspace = KVWorkspace(layers, torch.bfloat16, torch.device("cuda"))
        workspace.borrow(rows, 8)
        decoder, found = FusedDecoder(plan, ops), []
        for place in range(3):
            at = torch.full((rows,), place, device="cuda")
            step = Decode(workspace, at, place, equal=True)
            found.append(decoder(ids[:, place : place + 1], at[:, None], step))
        want = exact(ids).logits
        return (torch.stack(found, 1).float() - want).norm() / want.norm()

    class Counted(TritonOps):
        split = 0

        def residual_norm(self, x_NE, delta, norm):
            self.split += isinstance(delta, Partials)
            return super().residual_norm(x_NE, delta, norm)

    ops = Counted()
    with torch.no_grad():
        # Of one size: both only round.
        assert errors(ops) < 1.25 * errors(TorchOps())
    assert ops.split == 2 * 2 * 3  # of every layer both, in every step


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 8, 64), (14, 2, 64), (5, 1, 80)])
@pytest.mark.parametrize("length", [1, 7])
def test_rotation(dtype, heads, kv_heads, size, length):
    both = random(3, length, (heads + kv_heads) * size, dtype=dtype)  # as one product leaves them
    query, key = (
        x.view(3, length, -1, size).transpose(1, 2) for x in both.split(
            [heads * size, kv_heads * size], dim=-1
        )
    )  # fmt: skip
    angle = random(3, length, size // 2, seed=1).double()
    angle = torch.cat([angle, angle], -1)
    want = []
    for x in (query.double(), key.double()):
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        want.append(x * angle.cos()[:, None] + turned * angle.sin()[:, None])

    got = TritonOps().rotate(query, key, angle.cos().to(dtype), angle.sin().to(dtype))

    for have, expected in zip(got, want, strict=True):
        near(have, expected, dtype)


@DTYPES
def test_head_norm(dtype):
    norm = norm_of("rms", 64, dtype)
    heads = random(3, 5, 2 * 12 * 64, dtype=dtype).view(3, 5, 24, 64)[:, :, :12].transpose(1, 2)

    near(TritonOps().head_norm(heads, norm), layer_norm_64(heads.double(), norm), dtype)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize("kind", ["relu", "gelu", "gated", "gated-joined"])
def test_mlp(dtype, tokens, kind):
    class Layer(nn.Module):
        activation = "silu" if kind.startswith("gated") else kind

        def __init__(self):
            super().__init__()
            bias = not kind.startswith("gated")
            self.gate_proj = nn.Linear(96, 160, bias=False) if not bias else None
            self.up_proj = nn.Linear(96, 160, bias=bias)
            self.down = nn.Linear(160, 96, bias=bias)
            self.to("cuda", dtype)

        gate = property(lambda self: self.gate_proj)
        up = property(lambda self: self.up_proj)

    torch.manual_seed(0)
    layer = Layer()
    if kind == "gated-joined":
        assert join_storage(layer) == 1
    y = random(tokens, 96, dtype=dtype)

    def product(x, linear):
        out = x @ linear.weight.double().t()
        return out if linear.bias is None else out + linear.bias.double()

    inner = product(y.double(), layer.up)
    if layer.gate is not None:
        inner = nn.functional.silu(product(y.double(), layer.gate)) * inner
    else:
        inner = getattr(nn.functional, kind)(inner)

    near(TritonOps().mlp(y, layer), product(inner, layer.down), dtype)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("join", [True, False], ids=["joined", "apart"])
@pytest.mark.parametrize("family", ["opt", "llama", "mistral-window"])
def test_fused_decoders_answer_as_the_module_does(build, prompts, family, join, graphs):
    model = build(family).cuda()
    if join:
        join_storage(model)
    params = SamplingParams(24, seed=3)
    fused = Generator(model, HybridEngineSettings(enable_cuda_graph=graphs))
    got = fused.rollout(prompts, params)
    assert fused._model.fused.reason == ""
    plain = Generator(model, HybridEngineSettings(enable_cuda_graph=graphs))
    plain._model.fused.decoder = lambda _: None

    want = plain.rollout(prompts, params)

    # A uniform at the edge of two tokens' shares may fall to either, and the row then differs.
    same = [a == b for a, b in zip(got.tokens, want.tokens, strict=True)]
    assert sum(same) >= len(same) - 2
    for alike, have, expected in zip(same, got.logprobs, want.logprobs, strict=True):
        if alike:
            torch.testing.assert_close(have, expected, rtol=0, atol=1e-4)


def test_torch_operations_serve_where_triton_is_not(build, prompts, monkeypatch):
    monkeypatch.setattr(ops_triton, "_kernels", lambda: None)
    model = build("llama").cuda()
    fused = Generator(model)
    fused.rollout(prompts, SamplingParams(4))

    decoder = fused._model.fused.used
    assert decoder is not None
    assert type(decoder.ops) is TorchOps
