"""The Triton sampling kernels against the torch sampler, and against exact probabilities."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from rlhf_app.hybrid_engine import SamplingParams
from rlhf_app.hybrid_engine.decode_state import ALIVE, COUNT, POSITION, STOPPED, TOKEN, DecodeState
from rlhf_app.hybrid_engine.sampling import Sampler, request_keys, uniforms
from rlhf_app.hybrid_engine.sampling_kernel import KernelSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
KINDS = {
    "plain": {},
    "tempered": {"temperature": 0.7},
    "suppressed": {"temperature": 1.5, "suppress_ids": (0, 3, 6, 4999)},
    "greedy": {"greedy": True, "temperature": 0.5},
    "top-k": {"top_k": 50},
    "top-k of one": {"top_k": 1},
    "top-p": {"top_p": 0.9},
    "tiny top-p": {"top_p": 1e-6},
    "whole top-p": {"top_p": 0.9999999},
    "both": {"top_k": 500, "top_p": 0.6, "suppress_ids": (1,)},
    "greedy of few": {"greedy": True, "top_k": 2},
}


def _logits(rows, vocabulary, dtype, spread=3.0):
    draw = torch.Generator("cuda").manual_seed(rows + vocabulary)
    return (torch.randn(rows, vocabulary, generator=draw, device=CUDA) * spread).to(dtype)


def _uniforms(rows):
    return uniforms(request_keys(1, 2, range(rows)).to(CUDA), 1)[:, 0]


def _close_cut(params, logits):
    """Rows where rounding decides whether top-p keeps one token more: bool [B]."""
    if params.top_p == 1.0:
        return torch.zeros(len(logits), dtype=torch.bool, device=CUDA)
    upto_top_k = SamplingParams(4, top_k=params.top_k, suppress_ids=params.suppress_ids)
    z = Sampler(upto_top_k, CUDA).filtered(logits).double() / params.temperature
    mass = z.softmax(1).sort(1, descending=True).values.cumsum(1)
    return ((mass - params.top_p).abs() < 1e-6).any(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [(1, 50_272), (32, 50_257), (512, 50_272), (5, 128_256), (33, 151_936), (3, 5_000)],
)
def test_tokens_and_logprobs_are_the_torch_samplers(kind, dtype, rows, vocabulary):
    params = SamplingParams(4, **KINDS[kind])
    logits, u = _logits(rows, vocabulary, dtype), _uniforms(rows)
    if kind == "whole top-p" and dtype is torch.float32:
        pytest.skip("the mass that is cut is of the size of fp32's rounding")
    reference = Sampler(params, CUDA)
    want, _ = reference(logits, u)
    got, logprobs = KernelSampler(params, CUDA)(logits, u)
    z = reference.filtered(logits).double()
    exact = torch.log_softmax(z, 1)
    gap = (logprobs.double() - exact.gather(1, got[:, None])[:, 0]).abs()
    assert (gap[~_close_cut(params, logits)] < 1e-5).all()
    different = (got != want).nonzero()[:, 0]
    assert not (params.greedy and len(different))
    # The uniform lies at the edge of both tokens' shares.
    upto = exact[different].exp().cumsum(1).gather(1, got[different][:, None])[:, 0]
    below = upto - exact[different, got[different]].exp()
    outside = torch.maximum(below - u[different], u[different] - upto)
    assert (outside < 1e-6).all()


@pytest.mark.parametrize("edge", [2.0**-41, 1 - 2.0**-41])
def test_extreme_uniforms_never_leave_the_support(edge):
    logits = _logits(64, 50_272, torch.bfloat16)
    logits[:, 40_000:] = -math.inf
    hidden = tuple(range(100))
    u = torch.full((64,), edge, dtype=torch.float64, device=CUDA)
    tokens, logprobs = KernelSampler(SamplingParams(1, suppress_ids=hidden), CUDA)(logits, u)
    assert ((tokens >= 100) & (tokens < 40_000)).all()
    assert logprobs.isfinite().all()


def test_frequencies_follow_the_softmax():
    """Pearson's chi-square over 40,000 draws, 99.9 % quantile of 11 degrees of freedom."""
    draws, ids = (
        40_000,
        torch.tensor([0, 7, 255, 256, 300, 2047, 2048, 3000, 4100, 6000, 9000, 9999]),
    )
    values = torch.randn(12, generator=torch.Generator().manual_seed(3))
    logits = torch.full((10_000,), -math.inf)
    logits[ids] = values
    expected = torch.softmax(values.double() / 1.3, 0) * draws
    tokens, _ = KernelSampler(SamplingParams(1, temperature=1.3), CUDA)(
        logits.to(CUDA).expand(draws, -1), _uniforms(draws)
    )
    counts = torch.stack([(tokens == i).sum() for i in ids.to(CUDA)]).double().cpu()
    assert counts.sum() == draws
    assert ((counts - expected) ** 2 / expected).sum().item() < 31.3


def test_ties_fall_as_in_the_torch_sampler():
    """Whole numbers: nearly everything ties."""
    logits = _logits(64, 5_000, torch.float32).round()
    for params in (
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, top_k=100),
        SamplingParams(1, greedy=True),
    ):
        u = _uniforms(64)
        got, logprobs = KernelSampler(params, CUDA)(logits, u)
        want, reference = Sampler(params, CUDA)(logits, u)
        assert torch.equal(got, want)
        torch.testing.assert_close(logprobs, reference, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["plain", "greedy", "top-k", "top-p", "both"])
@pytest.mark.parametrize("where", ["one", "all"])
def test_nan_gives_a_legal_token_and_a_nan_logprob(kind, where):
    logits = _logits(4, 5_000, torch.bfloat16)
    logits[1, 17 if where == "one" else slice(None)] = math.nan
    tokens, logprobs = KernelSampler(SamplingParams(1, **KINDS[kind]), CUDA)(logits, _uniforms(4))
    assert ((tokens >= 0) & (tokens < 5_000)).all()
    assert logprobs.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("stop_ids", [(), tuple(range(0, 2_000, 3))])
def test_rows_advance_as_without_the_kernels(stop_ids):
    params = SamplingParams(6, seed=3, stop_ids=stop_ids)
    rows, limits = 9, [1, 2, 3, 4, 5, 6, 6, 6, 6]
    states = []
    for kernels in (True, False):
        state = DecodeState(CUDA)
        if not kernels:
            state.agree = lambda tokens, logprobs: (tokens, logprobs)  # takes the torch path
        state.begin(params, request_keys(3, 0, range(rows)), limits, rows + 3)
        view = state.admit(0, list(range(rows)), list(range(rows)), [5] * rows)
        for step in range(7):
            state.record(
                state.rows[:, : rows + 3] if step else view,
                _logits(rows + 3 if step else rows, 2_000, torch.bfloat16, 1.0 + step),
            )
        states.append((state.rows[:, :rows].cpu(), state.answers(rows)))
    (got, drawn), (want, reference) = states
    for field in (TOKEN, POSITION, COUNT, ALIVE, STOPPED):
        assert torch.equal(got[field], want[field])
    assert got[ALIVE].sum() == 0
    for row, count in enumerate(got[COUNT].tolist()):
        assert torch.equal(drawn.tokens[row, :count], reference.tokens[row, :count])
        torch.testing.assert_close(
            drawn.logprobs[row, :count], reference.logprobs[row, :count], atol=1e-5, rtol=0
        )
    assert stop_ids or got[COUNT].tolist() == limits


def test_a_captured_draw_follows_its_inputs():
    sampler = KernelSampler(SamplingParams(1, top_k=40, suppress_ids=(5,)), CUDA)
    logits, u = _logits(8, 50_272, torch.bfloat16), _uniforms(8)
    sampler(logits, u)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs = sampler(logits, u)
    for seed in (1, 2):
        logits.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        u.uniform_(generator=torch.Generator("cuda").manual_seed(seed))
        graph.replay()
        want = sampler(logits, u)
        assert torch.equal(tokens, want[0])
        assert torch.equal(logprobs, want[1])
