"""Log-probs from hidden states against torch's log_softmax and autograd, and their memory."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_app.training.chunked_logprobs import chunked_logprobs

N, E, V = 150, 6, 301
# Everything at once; several tokens and several ids a block, in the second case more than the
# tile that blocks are rounded to; one of each.
BLOCKS = [None, 4 * V * 140, 4 * V * 20, 4]
SUPPRESSED = (0, 3, 300)


def make(dtype=torch.float64, n=N, v=V, e=E, requires_grad=True):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, e, generator=draw, dtype=torch.float64)
    weight = torch.randn(v, e, generator=draw, dtype=torch.float64)
    bias = torch.randn(v, generator=draw, dtype=torch.float64)
    targets = torch.randint(4, v - 1, (n,), generator=draw)
    weights = [t.to(dtype).requires_grad_(requires_grad) for t in (hidden, weight, bias)]
    return (*weights, targets)


def plain(hidden, weight, bias, targets, temperature=1.0, suppress_ids=()):
    """What a loss over all logits does; log-probs, all log-probs."""
    logits = F.linear(hidden, weight, bias)
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if suppress_ids:
        scaled = scaled.index_fill(1, torch.tensor(suppress_ids), -math.inf)
    logprobs = scaled.log_softmax(1)
    return logprobs.gather(1, targets[:, None])[:, 0], logprobs


def upstream(n=N):
    """A gradient as a policy loss has it: of both signs, and 0 for some tokens."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values[::7] = 0.0
    return values


@pytest.mark.parametrize("block_bytes", BLOCKS)
@pytest.mark.parametrize("suppress_ids", [(), SUPPRESSED])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_complaint_peers20_values_and_gradients_are_those_of_log_softmax(
    dtype, tolerance, temperature, suppress_ids, block_bytes
):
    inputs = make(dtype)
    scores = chunked_logprobs(
        *inputs, temperature=temperature, suppress_ids=suppress_ids, with_entropy=True,
        with_correct=True, block_bytes=block_bytes,
    )  # fmt: skip
    exact = make()
    logprobs, all_logprobs = plain(*exact, temperature, suppress_ids)
    torch.testing.assert_close(scores.logprobs.double(), logprobs, atol=tolerance, rtol=0)
    finite = all_logprobs.masked_fill(all_logprobs == -math.inf, 0.0)
    entropy = -(finite.exp() * finite * (all_logprobs > -math.inf)).sum(1)
    torch.testing.assert_close(scores.entropy.double(), entropy, atol=tolerance, rtol=0)
    assert torch.equal(scores.correct, all_logprobs.argmax(1) == inputs[3])
    assert 0 < scores.correct.sum() < N
    of_entropy = upstream().flip(0)
    losses = [
        ((p * upstream()).sum(), (h * of_entropy).sum())
        for p, h in ((scores.logprobs, scores.entropy), (logprobs, entropy))
    ]
    got, want = (
        [
            torch.autograd.grad(loss, weights[:3], retain_graph=True)
            for loss in (of_logprobs, of_logprobs + of_entropy, of_entropy)
        ]
        for (of_logprobs, of_entropy), weights in zip(losses, (inputs, exact), strict=True)
    )
    for a, b in zip(sum(got, ()), sum(want, ()), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, atol=tolerance * b.abs().max().item(), rtol=0)


def test_two_tokens_by_hand():
    """Logits 0 and ln 3: probabilities 1/4 and 3/4, at half the temperature 1/10 and 9/10."""
    weight = torch.tensor([[0.0], [math.log(3)]])
    for temperature, p in ((1.0, 0.25), (0.5, 0.1)):
        scores = chunked_logprobs(
            torch.ones(2, 1), weight, None, torch.tensor([0, 1]),
            temperature=temperature, with_entropy=True, with_correct=True,
        )  # fmt: skip
        assert scores.logprobs.tolist() == pytest.approx([math.log(p), math.log(1 - p)])
        entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
        assert scores.entropy.tolist() == pytest.approx([entropy] * 2)
        assert scores.correct.tolist() == [False, True]


@pytest.mark.parametrize("block_bytes", [None, 60])
def test_gradcheck(block_bytes):
    hidden, weight, bias, targets = make(n=4, v=7, e=3)

    def logprobs(hidden, weight, bias):
        return chunked_logprobs(
            hidden, weight, bias, targets.clamp(max=5), temperature=0.8, suppress_ids=(1, 6),
            block_bytes=block_bytes,
        ).logprobs  # fmt: skip

    assert torch.autograd.gradcheck(logprobs, (hidden, weight, bias))


@pytest.mark.parametrize("block_bytes", BLOCKS)
def test_bf16_rounds_no_more_than_plain_autograd(block_bytes):
    """Distance from the exact gradient at the same bf16 numbers."""
    inputs = make(torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in inputs[:3]]
    truth, _ = plain(*exact, inputs[3])
    want = torch.autograd.grad((truth * upstream()).sum(), exact)
    ordinary, _ = plain(*inputs)
    baseline = torch.autograd.grad((ordinary * upstream()).sum(), inputs[:3])
    scores = chunked_logprobs(*inputs, block_bytes=block_bytes)
    assert scores.logprobs.dtype == torch.float32
    # The logits are rounded as a Linear rounds them: nothing else could be as near.
    torch.testing.assert_close(scores.logprobs, ordinary, atol=1e-5, rtol=0)
    got = torch.autograd.grad((scores.logprobs * upstream()).sum(), inputs[:3])
    for a, b, c in zip(got, baseline, want, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - c).norm() <= 1.2 * (b.double() - c).norm()


def test_the_same_bits_with_and_without_gradient():
    inputs = make(torch.float32)
    for block_bytes in BLOCKS:
        options = {"temperature": 0.9, "suppress_ids": SUPPRESSED, "block_bytes": block_bytes}
        with_gradient = chunked_logprobs(*inputs, **options).logprobs
        with torch.no_grad():
            without = chunked_logprobs(*inputs, **options, with_entropy=True).logprobs
        assert with_gradient.requires_grad
        assert not without.requires_grad
        assert torch.equal(with_gradient, without)


def test_a_tied_weight_gets_both_gradients():
    _, weight, _, targets = make()
    ids = torch.arange(N) % V
    got = chunked_logprobs(weight[ids], weight, None, targets, block_bytes=500).logprobs
    want, _ = plain(weight[ids], weight, None, targets)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), weight), torch.autograd.grad(want.sum(), weight)
    )


@pytest.mark.parametrize("block_bytes", BLOCKS)
def test_a_frozen_head_costs_no_gradient(block_bytes):
    hidden, weight, bias, targets = make()
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    chunked_logprobs(
        hidden, weight, bias, targets, block_bytes=block_bytes
    ).logprobs.sum().backward()
    assert weight.grad is None
    truth = make()[0]
    plain(truth, weight, bias, targets)[0].sum().backward()
    torch.testing.assert_close(hidden.grad, truth.grad)


@pytest.mark.parametrize("block_bytes", BLOCKS)
def test_no_token_has_gradients_of_zeros(block_bytes):
    hidden, weight, bias, targets = make(n=0)
    scores = chunked_logprobs(
        hidden, weight, bias, targets, with_entropy=True, with_correct=True, block_bytes=block_bytes
    )
    assert all(len(part) == 0 for part in scores)
    scores.logprobs.sum().backward()
    assert hidden.grad.shape == (0, E)
    assert weight.grad.shape == (V, E)
    assert not weight.grad.any()
    assert not bias.grad.any()


def test_tokens_that_cannot_be_and_logits_of_minus_infinity():
    """A suppressed target has no probability; others keep theirs, and gradients stay finite."""
    hidden, weight, _, targets = make()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[5] = -math.inf
    targets = targets.clone()
    targets[0], targets[1:] = 3, 7
    scores = chunked_logprobs(
        hidden, weight, bias, targets, suppress_ids=(3,), with_entropy=True, block_bytes=999
    )
    assert scores.logprobs[0] == -math.inf
    assert scores.logprobs[1:].isfinite().all()
    assert scores.entropy.isfinite().all()
    mask = torch.arange(N) > 0
    torch.where(mask, scores.logprobs, 0.0).sum().backward()
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[0].any()


@pytest.mark.parametrize("block_bytes", BLOCKS)
def test_autocast_computes_as_a_linear_does(block_bytes):
    inputs = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        want, _ = plain(*inputs)
        got = chunked_logprobs(*inputs, block_bytes=block_bytes).logprobs
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    for a, b in zip(
        torch.autograd.grad((got * upstream()).sum(), inputs[:3]),
        torch.autograd.grad((want * upstream()).sum(), inputs[:3]),
        strict=True,
    ):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 1e-2 * b.norm()


def test_the_graph_can_be_kept():
    hidden, weight, bias, targets = make()
    loss = chunked_logprobs(hidden, weight, bias, targets).logprobs.sum()
    first = torch.autograd.grad(loss, weight, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(loss, weight)[0])


class LiveBytes(TorchDispatchMode):
    """Most bytes of tensors that operations made and that were alive at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self._seen.discard(key)
        self.now -= size


def peak_bytes(tokens, logprobs):
    hidden, weight, _, targets = make(torch.float32, n=tokens, v=151_936, e=4)
    with LiveBytes() as live:
        logprobs(hidden, weight, targets).sum().backward()
    assert weight.grad is not None
    return live.peak


def test_complaint_peers20_memory_does_not_grow_with_tokens_times_vocabulary():
    block = 16 << 20
    gradient = 151_936 * 4 * 4

    def chunked(hidden, weight, targets):
        options = {"temperature": 0.9, "suppress_ids": (1,), "with_entropy": True}
        return chunked_logprobs(
            hidden, weight, None, targets, block_bytes=block, **options
        ).logprobs

    def whole(hidden, weight, targets):
        return plain(hidden, weight, None, targets, 0.9)[0]

    few, many = peak_bytes(64, chunked), peak_bytes(256, chunked)
    # Logits and two more of their size in the forward; with the gradient in the backward.
    assert many < 3 * block + gradient + (1 << 20)
    assert few > block // 2
    assert peak_bytes(64, whole) > 2 * 64 * 151_936 * 4
    assert peak_bytes(128, whole) > 1.8 * peak_bytes(64, whole)
