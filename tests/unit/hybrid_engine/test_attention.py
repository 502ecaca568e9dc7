"""Attention against its definition: one query at a time, in fp64, with no mask algebra."""

import itertools
import math

import pytest
import torch

from rlhf_app.hybrid_engine import attention_math
from rlhf_app.hybrid_engine.alibi import Alibi
from rlhf_app.hybrid_engine.attention import (
    AttentionCall,
    Decode,
    Prefill,
    active,
    installed,
    workspace_attention,
)
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace, LayerShape

ROWS, HEADS, KV_HEADS, SIZE = 3, 4, 2, 8
CASES = list(itertools.product([None, 3, 100], [None, 1.5], [False, True]))
SLOPES = [0.5, 0.25, 0.7, 0.01]
ALIBI = Alibi(lambda length: torch.tensor(SLOPES)[:, None] * torch.arange(length))


def _reference(query, keys, values, scale, window, softcap, biased):
    """query [H, D] of the newest token; keys and values [K, L, D] up to and with it."""
    out = torch.zeros(HEADS, SIZE, dtype=torch.float64)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        k, v = keys[kv].double(), values[kv].double()
        if window is not None:
            k, v = k[-window:], v[-window:]
        logits = torch.stack([(query[head].double() * key).sum() * scale for key in k])
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if biased:  # Press et al. 2022: minus slope times the distance
            distance = torch.arange(len(logits) - 1, -1, -1)
            logits = logits - SLOPES[head] * distance
        weights = logits.exp() / logits.exp().sum()
        out[head] = (weights[:, None] * v).sum(0)
    return out.float()


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture
def workspace() -> KVWorkspace:
    made = KVWorkspace([LayerShape(KV_HEADS, SIZE, SIZE)], torch.float32, torch.device("cpu"))
    made.borrow(ROWS, 12)
    return made


@pytest.mark.parametrize(("window", "softcap", "biased"), CASES)
def test_prefill(workspace, window, softcap, biased):
    query, key, value = _random(2, HEADS, 6, SIZE), *_random(2, 2, KV_HEADS, 6, SIZE)
    call = AttentionCall(0, query, key, value, None, 0.3, window, softcap, {})
    call.alibi = ALIBI if biased else None
    got = Prefill(workspace, slice(1, 3)).attend(call)
    for row in range(2):
        for at in range(6):
            want = _reference(
                query[row, :, at], key[row, :, : at + 1], value[row, :, : at + 1], 0.3, window,
                softcap, biased,
            )  # fmt: skip
            torch.testing.assert_close(got[row, :, at], want, atol=1e-5, rtol=0)
    assert torch.equal(workspace.keys[0][1:3, :, :6], key)
    assert torch.equal(workspace.values[0][1:3, :, :6], value)
    assert not workspace.keys[0][0].any()


@pytest.mark.parametrize(("window", "softcap", "biased"), CASES)
@pytest.mark.parametrize("lengths", [[5, 5, 5], [2, 9, 0]])
@pytest.mark.parametrize("small_head", [0, 16], ids=["fused", "products"])
def test_decode(workspace, window, softcap, biased, lengths, small_head, monkeypatch):
    monkeypatch.setattr(attention_math, "SMALL_HEAD", small_head)
    stored_k, stored_v = _random(2, ROWS, KV_HEADS, 12, SIZE, seed=1)
    workspace.keys[0].copy_(stored_k)
    workspace.values[0].copy_(stored_v)
    query, key, value = _random(ROWS, HEADS, 1, SIZE), *_random(2, ROWS, KV_HEADS, 1, SIZE)
    equal = len(set(lengths)) == 1
    step = Decode(workspace, torch.tensor(lengths), max(lengths), equal)
    call = AttentionCall(0, query, key, value, None, 0.3, window, softcap, {})
    call.alibi = ALIBI if biased else None
    got = step.attend(call)
    assert got.shape == (ROWS, HEADS, 1, SIZE)
    for row, length in enumerate(lengths):
        keys = torch.cat([stored_k[row, :, :length], key[row]], dim=1)
        values = torch.cat([stored_v[row, :, :length], value[row]], dim=1)
        want = _reference(query[row, :, 0], keys, values, 0.3, window, softcap, biased)
        torch.testing.assert_close(got[row, :, 0], want, atol=1e-5, rtol=0)
        assert torch.equal(workspace.keys[0][row, :, length], key[row, :, 0])


@pytest.mark.parametrize("lengths", [[300, 300, 300], [200, 310, 0]])
def test_rounded_logits(lengths):
    """Beside the steps of a model that adds a bias in bfloat16: one rounding, then the softmax."""
    workspace = KVWorkspace([LayerShape(KV_HEADS, SIZE, SIZE)], torch.bfloat16, torch.device("cpu"))
    workspace.borrow(ROWS, 320)
    workspace.keys[0].copy_(_random(ROWS, KV_HEADS, 320, SIZE))
    workspace.values[0].copy_(_random(ROWS, KV_HEADS, 320, SIZE, seed=1))
    query = _random(ROWS, HEADS, 1, SIZE).bfloat16() * 3
    key, value = _random(2, ROWS, KV_HEADS, 1, SIZE).bfloat16()
    step = Decode(workspace, torch.tensor(lengths), max(lengths), len(set(lengths)) == 1)
    call = AttentionCall(
        0, query, key, value, None, 0.3, None, None, {}, alibi=ALIBI, rounded=True
    )  # fmt: skip
    got = step.attend(call)
    for row, length in enumerate(lengths):
        for head in range(HEADS):
            keys = torch.cat([workspace.keys[0][row, head // 2, :length], key[row, head // 2]])
            values = torch.cat(
                [workspace.values[0][row, head // 2, :length], value[row, head // 2]]
            )
            exact = keys.float() @ query[row, head, 0].float() * 0.3
            exact += (torch.arange(length + 1) * SLOPES[head]).bfloat16()
            weights = exact.bfloat16().float().softmax(0).bfloat16().float()
            want = weights @ values.float()
            torch.testing.assert_close(got[row, head, 0].float(), want, atol=2e-2, rtol=2e-2)
    call.rounded = False
    assert (step.attend(call) - got).abs().max() > 0.1, "rounding does not matter here"


def test_tables_of_biases_stay_where_they_are():
    made = []

    def make(length):
        made.append(length)
        return torch.tensor(SLOPES, dtype=torch.bfloat16)[:, None] * torch.arange(length)

    alibi = Alibi(make)
    first = alibi.table(17)
    assert first.shape == (4, 17)
    assert first.dtype == torch.float32
    assert first.stride(1) == 1
    alibi.table(500)
    assert alibi.table(17).data_ptr() == first.data_ptr() == alibi.table(30).data_ptr()
    assert torch.equal(alibi.table(500)[:, :17], first)
    assert made == [32, 512]
    assert [alibi.table(n).shape[1] for n in (1, 16, 64, 65)] == [1, 16, 64, 65]


def test_writing_past_the_workspace_is_an_index_error(workspace):
    Decode(workspace, torch.tensor([11]), 11, True)
    with pytest.raises(IndexError, match="12 tokens"):
        Decode(workspace, torch.tensor([12]), 12, True)
    query, key = _random(3, HEADS, 6, SIZE), _random(3, KV_HEADS, 6, SIZE)
    with pytest.raises(IndexError, match="4 rows"):
        Prefill(workspace, slice(1, 4)).attend(
            AttentionCall(0, query, key, key, None, 1.0, None, None, {})
        )


class _Config:
    _attn_implementation = "sdpa"


def test_interface_needs_an_active_step_and_restores_the_config():
    config = _Config()
    x = _random(1, 2, 1, 4)
    module = torch.nn.Module()
    module.layer_idx = 0
    seen = []

    def fail():
        with installed([config]):
            seen.append(config._attn_implementation)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == ["rlhf_kv_workspace"]
    assert config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="outside a rollout"):
        workspace_attention(module, x, x, x, None)


def test_default_scale_is_the_head_size():
    seen = []

    class Step:
        def attend(self, call):
            seen.append(call.scale)
            return call.query

    module = torch.nn.Module()
    module.layer_idx = 0
    x = _random(1, 2, 1, 16)
    with active(Step()):
        workspace_attention(module, x, x, x, None)
        workspace_attention(module, x, x, x, None, scaling=1.0)
    assert seen == [1 / math.sqrt(16), 1.0]
