"""Sampling and the bookkeeping of a decode step in two Triton kernels.

Shapes: B rows, V vocabulary.

The logits are read once, in their own dtype: no fp32 copy, no sort and no cumulative sum over the
vocabulary. A second, small kernel finds each row's token in the sums of the first and advances
the row. Launches depend on the number of rows and of tokens alone, and nothing is read back, so
that a CUDA graph can hold them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from rlhf_app.hybrid_engine import triton_modules
from rlhf_app.hybrid_engine.sampling import SamplingParams

# Tokens of one block of sums: what a warp reads at once in 16-bit logits, 16 bytes a thread.
_BLOCK = 256
# Blocks of one program: enough loads in flight at few warps.
_BLOCKS = 8
_SUM_WARPS = 4
_DRAW_WARPS = 2
# Tokens read at a time where a filter looks for its bound.
_FILTER_BLOCK, _FILTER_WARPS = 4096, 8
# Low bits of the fp32 keys that no logit of this dtype uses; an even number of bits is left.
_SHIFT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 12}


def _kernels() -> Any:
    return triton_modules.kernels("rlhf_app.hybrid_engine.triton_sampling")


def available(device: torch.device) -> bool:
    """Whether the kernels run on this device."""
    return device.type == "cuda" and _kernels() is not None


class Records(NamedTuple):
    """Where `KernelSampler.record` reads and writes; N requests, T answer tokens, S rows.

    Attributes:
        tokens_NT: int64.
        logprobs_NT: fp32.
        uniforms_NT: fp64 in (0, 1), unused when greedy.
        stop_ids: int64, of any number.
    """

    tokens_NT: torch.Tensor
    logprobs_NT: torch.Tensor
    uniforms_NT: torch.Tensor
    stop_ids: torch.Tensor


class _Suppressed(NamedTuple):
    banned_V: torch.Tensor  # uint8
    touched: torch.Tensor  # uint8, of each program of the sums: whether it has any


class KernelSampler:
    """`Sampler` for CUDA, the same in what it draws but for rounding.

    Args:
        params: the distribution's settings.
        device: where the logits will be.
    """

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._params = params
        self._device = device
        self._suppressed: dict[int, _Suppressed] = {}
        # In fp64, which scalar arguments are not: ties of the mass fall as the torch sampler's.
        goals = [float(params.top_k), params.top_p]
        self._goals = torch.tensor(goals, dtype=torch.float64, device=device)

    def __call__(
        self, logits_BV: torch.Tensor, uniforms_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token per row; see `Sampler.__call__`."""
        rows = logits_BV.shape[0]
        tokens_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
        logprobs_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
        # None of the row's fields is read: any tensor stands for them.
        self._launch(
            logits_BV, tokens_B, Records(tokens_B, logprobs_B, uniforms_B, tokens_B), False
        )
        return tokens_B, logprobs_B

    def record(self, state: torch.Tensor, logits_BV: torch.Tensor, records: Records) -> None:
        """Draw each row's next token; advance the rows that are alive.

        Args:
            state: [fields, B] int64, rows of `DecodeState.rows`.
            logits_BV: any float dtype.
            records: where tokens, log-probs, uniforms and stop ids are.
        """
        self._launch(logits_BV, state, records, True)

    def _launch(
        self, logits_BV: torch.Tensor, state: torch.Tensor, records: Records, record: bool
    ) -> None:
        kernels, params = _kernels(), self._params
        if logits_BV.dtype not in _SHIFT:
            logits_BV = logits_BV.float()
        if logits_BV.stride(1) != 1:
            logits_BV = logits_BV.contiguous()
        rows, vocabulary = logits_BV.shape
        device, stride = logits_BV.device, logits_BV.stride(0)
        parts = -(-vocabulary // (_BLOCK * _BLOCKS))
        blocks = parts * _BLOCKS
        span = 1 << (blocks - 1).bit_length()
        scale = math.log2(math.e) / params.temperature
        shift = _SHIFT[logits_BV.dtype]
        suppressed = bool(params.suppress_ids)
        banned_V, touched = self._ban(vocabulary) if suppressed else (logits_BV, logits_BV)
        highest = torch.empty((rows, blocks), dtype=torch.float32, device=device)
        sums = torch.empty_like(highest)
        top_k = 0 < params.top_k < vocabulary
        filtered = top_k or params.top_p < 1.0
        least_B = last_B = highest

        def sum_blocks(filtered: bool) -> None:
            kernels.block_sums[(parts, rows)](
                logits_BV, banned_V, touched, least_B, last_B, highest, sums,
                stride, vocabulary, scale,
                BLOCK=_BLOCK, BLOCKS=_BLOCKS, SHIFT=shift, SUPPRESSED=suppressed,
                FILTERED=filtered, num_warps=_SUM_WARPS,
            )  # fmt: skip

        sum_blocks(False)
        if filtered:
            least_B, last_B = torch.empty((2, rows), dtype=torch.int64, device=device)
            kernels.bounds[(rows,)](
                logits_BV, banned_V, highest, least_B, last_B, self._goals,
                stride, vocabulary, blocks, scale,
                BLOCK=_FILTER_BLOCK, SPAN=span, SHIFT=shift, BITS=32 - shift,
                SUPPRESSED=suppressed, TOP_K=top_k, TOP_P=params.top_p < 1.0,
                num_warps=_FILTER_WARPS,
            )  # fmt: skip
            sum_blocks(True)
        stops = records.stop_ids.numel() if record else 0
        kernels.draw[(rows,)](
            logits_BV, banned_V, least_B, last_B, highest, sums, state,
            records.uniforms_NT, records.stop_ids, records.tokens_NT, records.logprobs_NT,
            stride, state.stride(0), records.tokens_NT.stride(0), vocabulary, blocks, stops, scale,
            BLOCK=_BLOCK, SPAN=span, STOPS=1 << (stops - 1).bit_length() if stops else 0,
            SHIFT=shift, GREEDY=params.greedy, SUPPRESSED=suppressed, FILTERED=filtered,
            RECORD=record, num_warps=_DRAW_WARPS,
        )  # fmt: skip

    def _ban(self, vocabulary: int) -> _Suppressed:
        """Suppressed ids as a table; made once per vocabulary, kept as long as the sampler."""
        if vocabulary not in self._suppressed:
            share = _BLOCK * _BLOCKS
            padded = torch.zeros(-(-vocabulary // share) * share, dtype=torch.uint8)
            padded[list(self._params.suppress_ids)] = 1
            touched = padded.view(-1, share).amax(1)
            self._suppressed[vocabulary] = _Suppressed(
                padded.to(self._device), touched.to(self._device)
            )
        return self._suppressed[vocabulary]
