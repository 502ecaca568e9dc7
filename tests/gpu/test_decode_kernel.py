"""The Triton kernel against attention written out row by row in fp64."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernel is written in Triton")

from rlhf_app.hybrid_engine import decode_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [0, 5, 63, 64, 299]
SLOTS = [3, 1, 6, 0, 2]


def _reference(query, key, value, scale, window, softcap, biases):
    """[H, 1, D] of one row over its own [K, L, D] keys and values."""
    groups, length = query.shape[0] // key.shape[0], key.shape[1]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    logits = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if biases is not None:
        logits = logits + biases[:, None, :length]
    if window is not None:
        logits[..., : max(0, length - window)] = -math.inf
    return torch.softmax(logits, -1) @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window", "softcap", "biased", "parts"),
    [
        (4, 4, 64, None, None, False, 1),
        (8, 2, 64, None, None, False, 4),
        (4, 1, 24, 9, None, False, 2),
        (8, 2, 128, None, 5.0, False, 1),
        (4, 4, 80, None, None, True, 3),
        (2, 2, 256, 70, 3.0, True, None),
    ],
)
def test_kernel(dtype, heads, kv_heads, size, window, softcap, biased, parts):
    draw = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=draw, device="cuda").to(dtype)

    rows, slots, positions = len(LENGTHS), 7, 304
    query = random(rows, 1, heads, size).transpose(1, 2)
    new_key, new_value = random(rows, kv_heads, 1, size), random(rows, kv_heads, 1, size)
    keys, values = (
        random(slots, kv_heads, positions, size),
        random(slots, kv_heads, positions, size),
    )
    biases = random(heads, positions).float() if biased else None
    stored = keys.clone(), values.clone()
    got = decode_kernel.decode_attention(
        query, new_key, new_value, keys, values,
        torch.tensor(SLOTS, device="cuda"), torch.tensor(LENGTHS, device="cuda"),
        scale=0.2, window=window, softcap=softcap, biases_HL=biases, parts=parts,
    )  # fmt: skip
    for row, (slot, length) in enumerate(zip(SLOTS, LENGTHS, strict=True)):
        stored[0][slot, :, length], stored[1][slot, :, length] = (
            new_key[row, :, 0],
            new_value[row, :, 0],
        )
        want = _reference(
            query[row].double(), stored[0][slot, :, : length + 1].double(),
            stored[1][slot, :, : length + 1].double(), 0.2, window, softcap, biases,
        )  # fmt: skip
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got[row].double(), want, atol=tolerance, rtol=tolerance)
    assert torch.equal(keys, stored[0])
    assert torch.equal(values, stored[1])


def test_rounded_logits():
    """BLOOM rounds logits and bias to bf16 before the softmax: here that decides the answer."""
    size, positions = 64, 64
    query = torch.zeros(1, 1, 1, size, device="cuda", dtype=torch.bfloat16)
    new = torch.zeros_like(query)
    keys = torch.zeros(1, 1, positions, size, device="cuda", dtype=torch.bfloat16)
    values = torch.zeros_like(keys)
    values[0, 0, 0], values[0, 0, 1] = 1.0, -1.0
    # 256.4 and 256.9 are 256 and 256 in bf16 (its step is 2 there): two equal weights, not e**.5.
    biases = torch.full((1, positions), -1e4, device="cuda")
    biases[0, 0], biases[0, 1] = 256.4, 256.9
    at = torch.tensor([0], device="cuda"), torch.tensor([5], device="cuda")
    got = decode_kernel.decode_attention(
        query, new, new, keys, values, *at, scale=1.0, biases_HL=biases, rounded=True
    )
    assert got.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [24, 64, 128])
@pytest.mark.parametrize("slots", [slice(2, 5), [6, 0, 3]], ids=["consecutive", "listed"])
def test_prompts_go_to_their_slots_and_nowhere_else(dtype, size, slots):
    draw = torch.Generator("cuda").manual_seed(0)
    # As a product of all projections leaves them: neighbours along the features.
    both = torch.randn((3, 70, 2, 2 * size), generator=draw, device="cuda").to(dtype)
    key, value = both[..., :size].transpose(1, 2), both[..., size:].transpose(1, 2)
    keys = torch.randn((8, 2, 100, size), generator=draw, device="cuda").to(dtype)
    values = keys.flip(0).contiguous()
    want = keys.clone(), values.clone()
    if isinstance(slots, list):
        slots = torch.tensor(slots, device="cuda")
    want[0][slots, :, :70], want[1][slots, :, :70] = key, value

    decode_kernel.store_prompts(key, value, keys, values, slots)

    assert torch.equal(keys, want[0])
    assert torch.equal(values, want[1])
