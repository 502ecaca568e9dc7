"""Products of few rows, their inner dimension split among programs, summed by whoever reads them.

A decode step of 16 to 64 rows reads each weight once and computes little with it. The two
products that end in the residual stream have few output features, so that one program per block
of them leaves much of a GPU without work. Splitting the inner dimension (split-K) gives it more
programs; their partial sums stay apart in fp32 until the kernel that adds them to the residual
stream reads them, which makes a pass of its own for the sum unnecessary. That kernel is launched
while the product still runs (programmatic dependent launch) and waits for it on the device.

Shapes: N rows, I inner features, E output features, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Output features that one program of `residual_norm` can take.
WIDEST = 16_384
# Where splitting was measured to pay: on an H200 (torch 2.11, Triton 3.6, bf16, a CUDA graph over
# weights that no cache holds), product and `residual_norm` together in microseconds, by cuBLAS and
# split. Overlapping the two saves about one more.
#   I -> E           16 rows        32 rows        64 rows
#    2048 -> 2048     7.7   6.9      8.5   7.2      8.6   7.8
#    8192 -> 2048    15.0  13.1     15.3  13.4     17.5  14.3
#    4096 -> 4096    14.2  12.6     14.9  13.1     13.7  13.9
#   11008 -> 4096    28.4  26.7     28.5  27.5     30.9  28.7
#     896 ->  896     5.8   5.0      5.9   5.3      5.9   5.7
#    4864 ->  896     8.7   7.8      8.8   8.0      9.0   8.7
FEWEST_ROWS, MOST_ROWS = 16, 64
FEWEST_INNER = 896
FEWEST_FEATURES, MOST_FEATURES = 896, 4096
_HOPPER = 9  # major compute capability; others differ in shared memory and were not measured
# Wider blocks leave too few programs, longer ones too little memory for loads ahead.
_BLOCK_OUT, _BLOCK_IN, _STAGES, _WARPS = 64, 128, 4, 4
_DTYPES = frozenset({torch.bfloat16, torch.float16})
_ALIGNED = 16  # bytes of one load


@dataclass(frozen=True, slots=True)
class Partials:
    """What a product adds to the residual stream: the sum over S, and the bias.

    Attributes:
        sums_SNE: [S, N, E] fp32, contiguous.
        bias_E: [E] in the weights' dtype, or None.
        overlaps: the product lets the next kernel start before its end.
    """

    sums_SNE: torch.Tensor
    bias_E: torch.Tensor | None
    overlaps: bool = False


def splits_for(rows: int, in_features: int, out_features: int) -> int | None:
    """Among how many programs the inner dimension is split; None where cuBLAS is as fast.

    Args:
        rows: N.
        in_features: I.
        out_features: E.
    """
    if not FEWEST_ROWS <= rows <= MOST_ROWS:
        return None
    if in_features < FEWEST_INNER or not FEWEST_FEATURES <= out_features <= MOST_FEATURES:
        return None
    if in_features % _BLOCK_IN or out_features % _BLOCK_OUT:
        return None
    # About one program for each of the 132 multiprocessors; more only add sums to read.
    return 4 if out_features <= 2048 else 2


def splits_of(x_NI: torch.Tensor, linear: nn.Linear) -> int | None:
    """Among how many programs this product is split; None where cuBLAS computes it.

    Args:
        x_NI: [N, I].
        linear: from I to E features.
    """
    weight = linear.weight
    splits = splits_for(len(x_NI), weight.shape[1], weight.shape[0])
    if splits is None or x_NI.dtype not in _DTYPES or weight.dtype != x_NI.dtype:
        return None
    for operand in (x_NI, weight):
        if not operand.is_contiguous() or operand.data_ptr() % _ALIGNED:
            return None
    return splits if _measured(x_NI.device) else None


def _measured(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER


def partial_product(kernels: Any, x_NI: torch.Tensor, linear: nn.Linear, splits: int) -> Partials:
    """Multiply, and leave the sum over the splits to whoever reads them.

    Args:
        kernels: the module `triton_layers`.
        x_NI: [N, I] contiguous.
        linear: from I to E features, multiples of the blocks.
        splits: the most that there may be: none is empty.
    """
    rows, inner = x_NI.shape
    features = linear.weight.shape[0]
    blocks = inner // _BLOCK_IN
    share = -(-blocks // splits)
    sums_SNE = x_NI.new_empty((-(-blocks // share), rows, features), dtype=torch.float32)
    overlaps = kernels.CAN_OVERLAP and x_NI.is_cuda
    kernels.partial_product[(features // _BLOCK_OUT, len(sums_SNE))](
        x_NI, linear.weight, sums_SNE, rows, features, inner, share * _BLOCK_IN,
        ROWS=max(16, 1 << (rows - 1).bit_length()), OUT=_BLOCK_OUT, IN=_BLOCK_IN,
        OVERLAP=overlaps, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return Partials(sums_SNE, linear.bias, overlaps)
