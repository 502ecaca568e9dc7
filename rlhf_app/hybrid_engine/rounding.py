"""Whether logits differ by more than rounding explains."""

from __future__ import annotations

import torch

# Largest |a - b| over |b|, norms of logits without their mean. Summation order alone makes 1e-6
# in fp32 (1e-3 with TF32) and a few percent in a deep bf16 model.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 5e-3, torch.float16: 5e-2}
_LOW_PRECISION_TOLERANCE = 0.15


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference of logits that rounding alone explains.

    Args:
        dtype: of weights or logits.
    """
    return _TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE)


def disagreement(have: torch.Tensor, want: torch.Tensor, allowed: float) -> float | None:
    """Largest relative difference of any row's logits, where it is more than is allowed.

    Args:
        have: [..., V] any float dtype.
        want: [..., V]. A constant added to all logits of a row changes no probability: the size
            of a row counts without its mean.
        allowed: see `tolerance`.

    Returns:
        None where every row agrees, and where `want` is not finite (broken weights): there is
        nothing to compare with.
    """
    want, have = want.float(), have.float()
    if not want.isfinite().all():
        return None
    scale = (want - want.mean(-1, keepdim=True)).norm(dim=-1)
    gap = (have - want).norm(dim=-1)
    if bool((gap <= allowed * scale).all()):
        return None
    return float((gap / scale).max())
