"""The operations of a fused decoder, for implementations on different devices.

Shapes: N tokens (B rows x P), E features of the residual stream, B rows, H query heads, K kv
heads, P tokens of a row, D head size.

Rounding follows the modules': a sum of the residual stream is rounded to its dtype before it is
normalised, an RMS norm rounds before it multiplies by its weight, and a projection is rounded
once, bias included. Every operation reads the weights of its modules when it is called.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from rlhf_app.hybrid_engine.fused.plan import LayerPlan, Norm

# What a layer adds to the residual stream, in whatever form suits the operations that made it:
# only their own `residual_norm` reads it.
Delta: TypeAlias = Any


class Ops(Protocol):
    """What `FusedDecoder` computes with."""

    def residual_norm(
        self, x_NE: torch.Tensor, delta: Delta | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to the residual stream and normalise it.

        Args:
            x_NE: [N, E] contiguous; may be overwritten.
            delta: from `residual_linear` or `mlp`, added to it; None adds nothing.
            norm: what follows the sum.

        Returns:
            The sum [N, E] in the dtype of `x_NE`, and normalised [N, E].
        """
        ...

    def project(
        self, y_NE: torch.Tensor, linears: tuple[nn.Linear, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Several projections of the same input, such as query, key and value.

        Args:
            y_NE: [N, E] contiguous.
            linears: from E features.

        Returns:
            For each [N, its out_features]; unit stride along the features, any stride along N.
        """
        ...

    def head_norm(self, heads_BHPD: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalise every head.

        Args:
            heads_BHPD: [B, H, P, D], unit stride along D.
            norm: over D.

        Returns:
            [B, H, P, D].
        """
        ...

    def rotate(
        self,
        query_BHPD: torch.Tensor,
        key_BKPD: torch.Tensor,
        cos_BPD: torch.Tensor,
        sin_BPD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys by their positions: x * cos + (-second half, first half) * sin.

        Args:
            query_BHPD: [B, H, P, D], unit stride along D.
            key_BKPD: [B, K, P, D], unit stride along D.
            cos_BPD: [B, P, D] in their dtype.
            sin_BPD: [B, P, D].

        Returns:
            Both, rotated.
        """
        ...

    def linear(self, x_NI: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """One projection.

        Args:
            x_NI: [N, in_features] contiguous.
            linear: the projection.

        Returns:
            [N, out_features] contiguous.
        """
        ...

    def residual_linear(self, x_NI: torch.Tensor, linear: nn.Linear) -> Delta:
        """A projection whose result is added to the residual stream.

        Args:
            x_NI: [N, in_features] contiguous.
            linear: to E features.

        Returns:
            For `residual_norm`: [N, E], rounded as by `linear` when it is added.
        """
        ...

    def mlp(self, y_NE: torch.Tensor, layer: LayerPlan) -> Delta:
        """The layer's MLP, from its normalised input to what is added to the residual stream.

        Args:
            y_NE: [N, E] contiguous.
            layer: its `gate`, `up`, `down` and `activation` count.

        Returns:
            For `residual_norm`: [N, E].
        """
        ...
