"""Log-probs from hidden states on CUDA: memory that does not grow, and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from rlhf_app.training.chunked_logprobs import BLOCK_BYTES, chunked_logprobs

VOCAB, HIDDEN = 151_936, 64
BLOCK = BLOCK_BYTES["cuda"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(tokens, dtype=torch.bfloat16):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, device="cuda").mul(0.3).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (tokens,), device="cuda")


def peak(tokens, with_entropy):
    """Bytes beyond the inputs at the height of forward and backward."""
    hidden, weight, targets = make(tokens)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores = chunked_logprobs(
        hidden, weight, None, targets, temperature=0.9, suppress_ids=(1, 2),
        with_entropy=with_entropy,
    )  # fmt: skip
    scores.logprobs.sum().backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("with_entropy", [False, True])
def test_memory_does_not_grow_with_tokens_times_vocabulary(with_entropy):
    gradients = VOCAB * HIDDEN * 2
    few, many = peak(2_048, with_entropy), peak(32_768, with_entropy)
    # What does grow is a row of the hidden states' gradient, in fp32 and bf16.
    assert many < 3 * BLOCK + gradients + 32_768 * HIDDEN * 16
    assert many < 1.5 * few
    assert many < 32_768 * VOCAB * 2 / 4  # a quarter of the bare bf16 logits


@pytest.mark.parametrize("tokens", [300, 4_096])
def test_gradients_round_no_more_than_plain_autograd(tokens):
    hidden, weight, targets = make(tokens)
    upstream = torch.randn(tokens, device="cuda")

    def gradients(hidden, weight, logprobs):
        return torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))

    def plain(hidden, weight):
        logprobs = (F.linear(hidden, weight).float() / 0.9).log_softmax(-1)
        return logprobs.gather(1, targets[:, None])[:, 0]

    scores = chunked_logprobs(hidden, weight, None, targets, temperature=0.9)
    torch.testing.assert_close(scores.logprobs, plain(hidden, weight), atol=1e-4, rtol=0)
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    truth = gradients(*exact, plain(*exact))
    baseline = gradients(hidden, weight, plain(hidden, weight))
    for a, b, c in zip(gradients(hidden, weight, scores.logprobs), baseline, truth, strict=True):
        assert (a.float() - c).norm() <= 1.2 * (b.float() - c).norm()


def test_the_same_bits_with_and_without_gradient():
    hidden, weight, targets = make(4_096)
    with_gradient = chunked_logprobs(hidden, weight, None, targets, temperature=0.9).logprobs
    with torch.no_grad():
        scores = chunked_logprobs(hidden, weight, None, targets, temperature=0.9, with_entropy=True)
    assert torch.equal(with_gradient, scores.logprobs)
