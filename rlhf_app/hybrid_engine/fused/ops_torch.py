"""The operations of a fused decoder in plain torch: for the CPU, and for CUDA without Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rlhf_app.hybrid_engine.fused.ops import Delta
from rlhf_app.hybrid_engine.fused.plan import LayerPlan, Norm

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
}


class TorchOps:
    """See `Ops`."""

    def residual_norm(
        self, x_NE: torch.Tensor, delta: Delta | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to the residual stream and normalise it."""
        if delta is not None:
            x_NE = x_NE + delta
        return x_NE, normalised(x_NE, norm)

    def project(
        self, y_NE: torch.Tensor, linears: tuple[nn.Linear, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Several projections of the same input."""
        return tuple(F.linear(y_NE, linear.weight, linear.bias) for linear in linears)

    def head_norm(self, heads_BHPD: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalise every head."""
        return normalised(heads_BHPD, norm)

    def rotate(
        self,
        query_BHPD: torch.Tensor,
        key_BKPD: torch.Tensor,
        cos_BPD: torch.Tensor,
        sin_BPD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys by their positions."""
        cos, sin = cos_BPD[:, None], sin_BPD[:, None]
        return _rotated(query_BHPD, cos, sin), _rotated(key_BKPD, cos, sin)

    def linear(self, x_NI: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """One projection."""
        return F.linear(x_NI, linear.weight, linear.bias)

    def residual_linear(self, x_NI: torch.Tensor, linear: nn.Linear) -> Delta:
        """A projection whose result is added to the residual stream."""
        return self.linear(x_NI, linear)

    def mlp(self, y_NE: torch.Tensor, layer: LayerPlan) -> Delta:
        """The layer's MLP."""
        activation = ACTIVATIONS[layer.activation]
        if layer.gate is None:
            inner = activation(self.linear(y_NE, layer.up))
        else:
            inner = activation(self.linear(y_NE, layer.gate)) * self.linear(y_NE, layer.up)
        return self.residual_linear(inner, layer.down)


def normalised(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Apply a norm over the last dimension.

    Args:
        x: [..., E].
        norm: over E.
    """
    module: Any = norm.module
    if norm.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, norm.eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    scaled: torch.Tensor = module.weight * wide.to(x.dtype)
    return scaled


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
