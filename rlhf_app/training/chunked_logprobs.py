"""Log-probs of given tokens straight from hidden states, never all logits at once.

Logits of N tokens over a vocabulary of 151,936 are 600 KB a token in fp32, and a plain loss holds
several such tensors. Here they exist a block at a time: in the forward for some tokens and the
whole vocabulary, in the backward, which computes them again, for all tokens and a part of the
vocabulary, so that each row of the weight's gradient is one product, rounded once.

Shapes: N tokens, E hidden size, V vocabulary, C tokens of a block, K ids of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Bytes of one block in fp32. On CUDA large enough for matrix products at full speed, on the CPU
# small enough to stay near the caches. A block takes up to two and a half times as much: the
# logits themselves, and two fp32 copies where the entropy is asked for, or its gradient.
BLOCK_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
# Blocks begin at multiples of this: a tile of a matrix product.
_TILE = 128
# Below any log-prob, and finite after a product, so that a probability of 0 times it is 0.
_LOWEST = -1e30
_HALF = (torch.bfloat16, torch.float16)


class TokenScores(NamedTuple):
    """What a model's distribution says of N tokens.

    Attributes:
        logprobs: fp32 (fp64 from fp64 logits), nats.
        entropy: of the distributions, nats; None unless asked for.
        correct: bool, the token is the most likely one; None unless asked for.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    correct: torch.Tensor | None = None


class _Settings(NamedTuple):
    temperature: float
    suppress_ids: tuple[int, ...]
    with_entropy: bool
    with_correct: bool
    block_bytes: int
    differentiable: bool


def chunked_logprobs(
    hidden_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    suppress_ids: Sequence[int] = (),
    with_entropy: bool = False,
    with_correct: bool = False,
    block_bytes: int | None = None,
) -> TokenScores:
    """Log-probs of `targets_N` under softmax((hidden W^T + bias) / temperature).

    Logits are rounded to the dtype of the hidden states, as those of an `nn.Linear` are; all that
    follows is fp32. Memory beyond inputs and gradients does not grow with N x V. Gradients of
    log-probs and entropy flow to hidden states, weight and bias: the gradient of the logits is
    rounded to their dtype, as autograd's is, and the hidden states' gradient is summed over blocks
    in fp32.

    Args:
        hidden_NE: float, N may be 0. Under autocast the product has autocast's dtype.
        weight_VE: of the head, in the dtype of the hidden states.
        bias_V: of the head, or None.
        targets_N: int64 token ids.
        temperature: divides the logits.
        suppress_ids: tokens without probability; the rest is renormalised.
        with_entropy: also return the entropy.
        with_correct: also return whether each target is the most likely token.
        block_bytes: of one block of logits in fp32; unset: by device. The blocks, and so every
            bit of the result, depend on shapes and this number alone.

    Returns:
        Scores of every token.
    """
    device = hidden_NE.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_NE, weight_VE = _cast(hidden_NE, dtype), _cast(weight_VE, dtype)
        bias_V = None if bias_V is None else _cast(bias_V, dtype)
    settings = _Settings(
        temperature=temperature,
        suppress_ids=tuple(suppress_ids),
        with_entropy=with_entropy,
        with_correct=with_correct,
        block_bytes=block_bytes or BLOCK_BYTES.get(device, BLOCK_BYTES["cpu"]),
        # Inside the function gradients are off, and it could not tell.
        differentiable=torch.is_grad_enabled(),
    )
    with torch.autocast(device, enabled=False):
        return TokenScores(
            *_ChunkedLogprobs.apply(hidden_NE, weight_VE, bias_V, targets_N, settings)
        )


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As autocast does, which leaves fp64 alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        count, vocabulary = len(hidden_NE), len(weight_VE)
        suppressed = _on_device(settings.suppress_ids, hidden_NE.device)
        parts: list[_Part] = []
        for tokens in _blocks(count, vocabulary, settings.block_bytes):
            logits_CV = F.linear(hidden_NE[tokens], weight_VE, bias_V)
            if suppressed is not None:
                logits_CV.index_fill_(1, suppressed, float("-inf"))
            score = _score_all if len(logits_CV) == count else _score
            parts.append(score(logits_CV, targets_N[tokens], settings))
        logprobs_N, log_sum_N, kept_NV, entropy_N, correct_N = _join(parts)
        ctx.settings = settings
        ctx.save_for_backward(
            hidden_NE, weight_VE, bias_V, targets_N, log_sum_N, kept_NV, entropy_N
        )
        if correct_N is not None:
            ctx.mark_non_differentiable(correct_N)
        # None, and not zeros, for an entropy that no loss depends on: it then costs nothing.
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N, correct_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None, _: object
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NE, weight_VE, bias_V, targets_N, log_sum_N, kept_NV, entropy_N = ctx.saved_tensors
        settings: _Settings = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        count, vocabulary = len(hidden_NE), len(weight_VE)
        grad_hidden_NE = grad_weight_VE = grad_bias_V = None
        if needs_weight:
            grad_weight_VE = torch.empty_like(weight_VE, memory_format=torch.contiguous_format)
        if needs_bias:
            grad_bias_V = torch.empty_like(bias_V)
        if grad_N is None:
            grad_N = torch.zeros(count, dtype=_wide(hidden_NE.dtype), device=hidden_NE.device)
        # d logprob / d logit = (one-hot - softmax) / temperature
        factor_N1 = (grad_N / -settings.temperature).unsqueeze(1)
        block_bytes = settings.block_bytes if kept_NV is None else None
        for ids in _blocks(vocabulary, count, block_bytes):
            weight_KE = weight_VE[ids]
            if kept_NV is None:
                bias_K = None if bias_V is None else bias_V[ids]
                logits_NK = F.linear(hidden_NE, weight_KE, bias_K)
                log_NK = _shift(logits_NK, log_sum_N.unsqueeze(1), settings.temperature)
            else:
                logits_NK = None
                log_NK = kept_NV
            of_entropy_NK = None
            if grad_entropy_N is not None:
                # d entropy / d logit = -softmax x (log softmax + entropy) / temperature
                factor = (grad_entropy_N / -settings.temperature).unsqueeze(1)
                of_entropy_NK = log_NK.clamp(min=_LOWEST).add_(entropy_N.unsqueeze(1)).mul_(factor)
            grad_NK = log_NK.exp_() if kept_NV is None else log_NK.exp()
            if of_entropy_NK is not None:
                of_entropy_NK.mul_(grad_NK)
            local_N1 = (targets_N - ids.start).unsqueeze(1)
            here_N1 = (local_N1 >= 0) & (local_N1 < len(weight_KE))
            grad_NK.scatter_add_(
                1, local_N1.clamp(0, len(weight_KE) - 1), -here_N1.to(grad_NK.dtype)
            )
            if of_entropy_NK is not None:
                grad_NK = of_entropy_NK.addcmul_(grad_NK, factor_N1)
            local_ids = tuple(i - ids.start for i in settings.suppress_ids if i in _range(ids))
            suppressed = _on_device(local_ids, hidden_NE.device)
            if suppressed is not None:
                grad_NK.index_fill_(1, suppressed, 0.0)
            # With an entropy's gradient the factor is in already.
            left_N1 = factor_N1 if of_entropy_NK is None else None
            grad_NK = _times(grad_NK, left_N1, hidden_NE.dtype, memory=logits_NK)
            if grad_weight_VE is not None:
                torch.mm(grad_NK.t(), hidden_NE, out=grad_weight_VE[ids])
            if grad_bias_V is not None:
                grad_bias_V[ids] = grad_NK.sum(0)
            if needs_hidden:
                last = ids.stop == vocabulary
                grad_hidden_NE = _add_product(grad_hidden_NE, grad_NK, weight_KE, last)
        return grad_hidden_NE, grad_weight_VE, grad_bias_V, None, None


class _Part(NamedTuple):
    """Of some tokens: `log_sum` is what makes log-probs of scaled logits; None if all are kept."""

    logprobs: torch.Tensor
    log_sum: torch.Tensor | None
    kept: torch.Tensor | None
    entropy: torch.Tensor | None
    correct: torch.Tensor | None


def _score_all(logits_NV: torch.Tensor, targets_N: torch.Tensor, settings: _Settings) -> _Part:
    """Scores where one block holds every token.

    Its log-probs are kept for the backward, which then need not compute the logits again.
    """
    correct_N = logits_NV.argmax(1) == targets_N if settings.with_correct else None
    wide = _wide(logits_NV.dtype)
    if settings.temperature == 1.0:
        scaled_NV = logits_NV.to(wide)
    elif logits_NV.dtype == wide:
        scaled_NV = logits_NV.div_(settings.temperature)
    else:
        scaled_NV = logits_NV / _divisor(settings.temperature, wide, logits_NV.device)
    all_logprobs_NV = scaled_NV.log_softmax(1)
    logprobs_N = all_logprobs_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    entropy_N = None
    if settings.with_entropy:
        lowest = torch.finfo(wide).min  # finite, so that a probability of 0 times it is 0
        entropy_N = -all_logprobs_NV.exp().mul_(all_logprobs_NV.clamp(min=lowest)).sum(1)
    kept_NV = all_logprobs_NV if settings.differentiable else None
    return _Part(logprobs_N, None, kept_NV, entropy_N, correct_N)


def _score(logits_CV: torch.Tensor, targets_C: torch.Tensor, settings: _Settings) -> _Part:
    """Scores of one block of several: fewer passes than with log-probs of all ids."""
    first_C1 = None
    if settings.with_correct:
        top_C1, first_C1 = logits_CV.max(1, keepdim=True)
    else:
        top_C1 = logits_CV.amax(1, keepdim=True)
    top_C1 = top_C1.to(_wide(logits_CV.dtype)) / settings.temperature
    shifted_CV = _shift(logits_CV, top_C1, settings.temperature)
    target_C = shifted_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1)
    exp_CV = shifted_CV.exp() if settings.with_entropy else shifted_CV.exp_()
    sum_C = exp_CV.sum(1)
    log_sum_C = sum_C.log()
    entropy_C = None
    if settings.with_entropy:
        # Finite, so that a probability of 0 times it is 0.
        shifted_CV.clamp_(min=torch.finfo(shifted_CV.dtype).min)
        entropy_C = log_sum_C - exp_CV.mul_(shifted_CV).sum(1) / sum_C
    correct_C = None if first_C1 is None else first_C1.squeeze(1) == targets_C
    log_sums_C = top_C1.squeeze(1) + log_sum_C
    return _Part(target_C - log_sum_C, log_sums_C, None, entropy_C, correct_C)


def _join(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]
    return _Part(
        torch.cat([part.logprobs for part in parts]),
        _cat([part.log_sum for part in parts]),
        None,
        _cat([part.entropy for part in parts]),
        _cat([part.correct for part in parts]),
    )


def _cat(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _shift(logits: torch.Tensor, offset_N1: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / temperature - offset in the offset's dtype, in one pass and a new tensor."""
    if temperature == 1.0:
        return torch.sub(logits, offset_N1)
    divisor_11 = _divisor(temperature, offset_N1.dtype, logits.device)
    return torch.addcdiv(-offset_N1, logits, divisor_11)


def _divisor(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor with dimensions: a number would divide in the dtype of the logits."""
    return torch.full((1, 1), value, dtype=dtype, device=device)


def _times(
    wide_NK: torch.Tensor,
    factor_N1: torch.Tensor | None,
    dtype: torch.dtype,
    memory: torch.Tensor | None,
) -> torch.Tensor:
    """The product, rounded to a dtype, in given memory of that dtype; None multiplies by 1."""
    if wide_NK.dtype == dtype:
        return wide_NK if factor_N1 is None else wide_NK.mul_(factor_N1)
    if memory is None:
        memory = torch.empty_like(wide_NK, dtype=dtype)
    if factor_N1 is None:
        return memory.copy_(wide_NK)
    return torch.mul(wide_NK, factor_N1, out=memory)


def _add_product(
    total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, last: bool
) -> torch.Tensor:
    """total + a b, summed in fp32; in the dtype of a and b once the last block is in."""
    if total is None and last:
        return a.mm(b)
    if a.dtype not in _HALF:
        return a.mm(b) if total is None else total.addmm_(a, b)
    if a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        part = torch.mm(a, b, out_dtype=torch.float32)
    else:  # this product rounds by itself
        part = a.mm(b).float()
    total = part if total is None else total.add_(part)
    return total.to(a.dtype) if last else total


def _blocks(length: int, width: int, block_bytes: int | None) -> Iterator[slice]:
    """Equal slices of `length`, each times `width` no more than a block; at least one slice."""
    blocks = 1 if block_bytes is None else -(-length * width * 4 // block_bytes)
    size = -(-length // max(1, blocks))
    if blocks > 1 and size > _TILE:
        size -= size % _TILE
    yield from (slice(at, min(at + size, length)) for at in range(0, max(1, length), max(1, size)))


def _range(ids: slice) -> range:
    return range(ids.start, ids.stop)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@lru_cache(maxsize=64)
def _on_device(ids: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    """Copied once: copying a list to the device waits for it."""
    return torch.tensor(ids, device=device) if ids else None
