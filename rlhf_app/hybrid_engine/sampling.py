"""From logits to tokens: counter-based uniforms, filters, inverse-CDF sampling, log-probs.

Shapes: B rows, T answer tokens, V vocabulary.

No generator state: the uniform behind answer token t of request `uid` is a hash of
(seed, step, uid, t). The same integer arithmetic runs on every device, so a sampled answer
does not depend on the batch it was decoded in, on its slot, or on how often a run resumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch

from rlhf_app.errors import ConfigError

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
# Odd multiples of 2**-41: exact in fp64, never 0, and u * total stays strictly below total.
_UNIFORM_BITS = 40
# Up to this size one cumulative sum is quicker than sums of blocks.
_SMALL_VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the answers of one rollout are drawn.

    Attributes:
        max_new_tokens: most tokens of one answer, the stop token included.
        temperature: logits are divided by this first; > 0 (greedy is its own switch).
        top_k: keep the k largest logits, and any equal to the k-th; 0 keeps all.
        top_p: then keep the smallest set of largest probabilities that reaches this mass.
        greedy: take the largest logit. The log-prob returned is still the one under the
            filtered distribution at `temperature`.
        stop_ids: an answer ends with the first of these, which it keeps.
        suppress_ids: never sampled; left out of the distribution before anything else.
        seed, step: with a request's uid and the token index they decide every draw.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    stop_ids: tuple[int, ...] = ()
    suppress_ids: tuple[int, ...] = ()
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed", "step"):
            if not _is_number(getattr(self, name), Integral):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give a whole number")
        for name in ("temperature", "top_p"):
            if not _is_number(getattr(self, name), Real):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give a number")
        for name in ("stop_ids", "suppress_ids"):
            # Tuples: parameters are compared and hashed.
            ids = getattr(self, name)
            if not isinstance(ids, tuple) or not all(_is_number(i, Integral) for i in ids):
                raise ConfigError(f"{name} is {ids!r}: give a tuple of token ids")
        if any(token < 0 for token in self.suppress_ids):
            raise ConfigError(f"suppress_ids holds {min(self.suppress_ids)}: ids start at 0")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}: give at least 1")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                f"temperature is {self.temperature}: give a number > 0, or greedy=True"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}: give 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}: give a number in (0, 1]")


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _mix(z: int) -> int:
    """Finaliser of splitmix64 (Steele et al. 2014) on Python integers modulo 2**64."""
    z = ((z ^ (z >> 30)) * _MIX_A) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX_B) & _MASK64
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    """The int64 with the same 64 bits."""
    return z - (1 << 64) if z >> 63 else z


def request_keys(seed: int, step: int, uids: Sequence[int]) -> torch.Tensor:
    """One hash per request, the start of its stream of uniforms.

    Args:
        seed: of the run.
        step: of the rollout, so that each rollout draws anew.
        uids: one integer per request (any size, taken modulo 2**64).

    Returns:
        [B] int64 on the CPU.
    """
    base = _mix(_mix((seed + _GOLDEN) & _MASK64) + step & _MASK64)
    keys = [_signed(_mix(base ^ _mix((uid + _GOLDEN) & _MASK64))) for uid in uids]
    return torch.tensor(keys, dtype=torch.int64)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; int64's own shift copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(keys_B: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` uniforms of each request's stream.

    Args:
        keys_B: [B] int64 from `request_keys`, on any device.
        count: how many tokens to draw for.

    Returns:
        [B, count] fp64 in (0, 1), bit-equal on every device.
    """
    index = torch.arange(1, count + 1, device=keys_B.device, dtype=torch.int64)
    z = keys_B[:, None] + index * _signed(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_A)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_B)
    z = z ^ _shift_right(z, 31)
    top = _shift_right(z, 64 - _UNIFORM_BITS)
    return (2 * top + 1).to(torch.float64) * 2.0 ** -(_UNIFORM_BITS + 1)


class Sampler:
    """Draws one token per row under one set of parameters, without reading tensors back.

    Args:
        params: the distribution's settings.
        device: where the logits will be.
    """

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._params = params
        self._suppress: torch.Tensor | None = None
        if params.suppress_ids:
            self._suppress = torch.tensor(params.suppress_ids, device=device, dtype=torch.int64)

    def filtered(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Logits of the distribution that is sampled from.

        Args:
            logits_BV: [B, V] any float dtype, raw model output.

        Returns:
            [B, V] fp32; tokens outside the support are -inf.
        """
        params = self._params
        z = logits_BV.float()
        if params.temperature != 1.0:
            z = z / params.temperature
        if self._suppress is not None:
            z = z.index_fill(1, self._suppress, -math.inf)
        if 0 < params.top_k < z.shape[1]:
            least = torch.topk(z, params.top_k, dim=1).values[:, -1:]
            z = z.masked_fill(z < least, -math.inf)
        if params.top_p < 1.0:
            z = _keep_top_p(z, params.top_p)
        return z

    def __call__(
        self, logits_BV: torch.Tensor, uniforms_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token per row.

        Args:
            logits_BV: [B, V] any float dtype.
            uniforms_B: [B] fp64 in (0, 1); unused when greedy.

        Returns:
            tokens [B] int64 and their log-probs [B] fp32 under the filtered distribution.
        """
        z = self.filtered(logits_BV)
        probs_BV = torch.softmax(z, dim=1)
        if self._params.greedy:
            tokens_B1 = z.argmax(dim=1, keepdim=True)
        else:
            tokens_B1 = _inverse_cdf(probs_BV, uniforms_B[:, None])
        return tokens_B1[:, 0], probs_BV.gather(1, tokens_B1)[:, 0].log()


def _inverse_cdf(probs_BV: torch.Tensor, uniforms_B1: torch.Tensor) -> torch.Tensor:
    """[B, 1] int64: the first token whose cumulative probability exceeds uniform x total.

    In fp64, as in fp32 the tail of a large vocabulary is below the spacing of the CDF. Of a
    large vocabulary blocks are summed first, and only the one that holds the token is looked
    into: a cumulative sum over all of it takes several times as long.
    """
    vocabulary = probs_BV.shape[1]
    if vocabulary <= _SMALL_VOCABULARY:
        cdf = probs_BV.double().cumsum(1)
        token = torch.searchsorted(cdf, uniforms_B1 * cdf[:, -1:], right=True)
        # Only NaN logits get to the end: keep the index legal, the NaN log-prob tells the rest.
        return token.clamp_(max=vocabulary - 1)
    width = 1 << ((vocabulary - 1).bit_length() + 1) // 2  # about its square root
    whole = vocabulary // width * width
    sums = probs_BV[:, :whole].unflatten(1, (-1, width)).sum(2, dtype=torch.float64)
    if whole < vocabulary:
        rest = probs_BV[:, whole:].sum(1, keepdim=True, dtype=torch.float64)
        sums = torch.cat([sums, rest], 1)
    upto = sums.cumsum(1)
    target = uniforms_B1 * upto[:, -1:]
    block = torch.searchsorted(upto, target, right=True).clamp_(max=sums.shape[1] - 1)
    ids = block * width + torch.arange(width, device=probs_BV.device)
    inside = probs_BV.gather(1, ids.clamp(max=vocabulary - 1)) * (ids < vocabulary)
    cdf = inside.double().cumsum(1)
    # Rounding may put the target just outside of its block.
    target = (target - (upto - sums).gather(1, block)).clamp_(min=0.0)
    target = torch.minimum(target, torch.nextafter(cdf[:, -1:], torch.zeros_like(target)))
    token = block * width + torch.searchsorted(cdf, target, right=True)
    return token.clamp_(max=vocabulary - 1)


def _keep_top_p(z_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask all but the smallest set of largest probabilities with mass >= top_p.

    A token stays when the mass of the tokens before it is below top_p, so the first always
    stays (Holtzman et al. 2020).
    """
    ordered, order = torch.sort(z_BV, dim=1, descending=True, stable=True)
    probs = torch.softmax(ordered, dim=1)
    before = torch.cumsum(probs, dim=1, dtype=torch.float64) - probs
    drop = torch.zeros_like(z_BV, dtype=torch.bool).scatter_(1, order, before >= top_p)
    return z_BV.masked_fill(drop, -math.inf)
