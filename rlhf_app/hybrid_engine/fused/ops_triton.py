"""The operations of a fused decoder on CUDA: few kernels, matrix products by cuBLAS.

Projections of one input whose weights lie side by side in memory are one matrix product (see
`joined`): small batches read a large matrix closer to the memory's bandwidth than three small
ones. What lies between the products is one Triton kernel each. The products that end in the
residual stream leave cuBLAS where few rows make splitting them pay (see `split_k`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rlhf_app.hybrid_engine import triton_modules
from rlhf_app.hybrid_engine.fused.joined import joined
from rlhf_app.hybrid_engine.fused.ops import Delta
from rlhf_app.hybrid_engine.fused.ops_torch import ACTIVATIONS, TorchOps
from rlhf_app.hybrid_engine.fused.plan import LayerPlan, Norm
from rlhf_app.hybrid_engine.fused.split_k import WIDEST, Partials, partial_product, splits_of

# Heads of one program: enough work to hide a launch, few enough to fill the GPU at small batches.
_HEADS = 8
_GATED_BLOCK = 1024


def _kernels() -> Any:
    return triton_modules.kernels("rlhf_app.hybrid_engine.fused.triton_layers")


def available(device: torch.device) -> bool:
    """Whether these operations run on this device."""
    return device.type == "cuda" and _kernels() is not None


class TritonOps(TorchOps):
    """See `Ops`; what has no kernel here is torch's."""

    def residual_norm(
        self, x_NE: torch.Tensor, delta: Delta | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to the residual stream, in place, and normalise it."""
        tokens, size = x_NE.shape
        if size > WIDEST:
            return super().residual_norm(x_NE, delta, norm)
        module: Any = norm.module
        bias = getattr(module, "bias", None) if norm.kind == "layer" else None
        added, splits, shared, step, overlaps = x_NE, 0, None, 0, False
        if isinstance(delta, Partials):
            added, splits, shared = delta.sums_SNE, len(delta.sums_SNE), delta.bias_E
            step, overlaps = delta.sums_SNE.stride(0), delta.overlaps
        elif delta is not None:
            added, splits = delta, 1
        width = 1 << (size - 1).bit_length()
        warps = width // (256 if splits > 1 else 512)  # sums are more to read
        launch = {"launch_pdl": True} if overlaps else {}
        out_NE = torch.empty_like(x_NE)
        # Operands that are absent are never read: any pointer stands for them.
        _kernels().residual_norm[(tokens,)](
            x_NE, added, x_NE if shared is None else shared, module.weight,
            module.weight if bias is None else bias, out_NE, size, step, norm.eps,
            SPLITS=splits, SHARED=shared is not None, RMS=norm.kind == "rms",
            BIASED=bias is not None, OVERLAP=overlaps, WIDTH=width,
            num_warps=min(max(warps, 1), 16), **launch,
        )  # fmt: skip
        return x_NE, out_NE

    def project(
        self, y_NE: torch.Tensor, linears: tuple[nn.Linear, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Several projections of the same input, in one product where their weights adjoin."""
        whole = joined(linears)
        if whole is None:
            return super().project(y_NE, linears)
        parts = F.linear(y_NE, whole.weight, whole.bias).split(whole.sizes, dim=-1)
        return tuple(parts[place] for place in whole.places)

    def head_norm(self, heads_BHPD: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalise every head."""
        batch, count, length, size = heads_BHPD.shape
        if norm.kind != "rms" or heads_BHPD.stride(-1) != 1:
            return super().head_norm(heads_BHPD, norm)
        module: Any = norm.module
        out = heads_BHPD.new_empty((batch, length, count, size))
        _kernels().head_norm[(batch * length, -(-count // _HEADS))](
            heads_BHPD, module.weight, out, length, count, norm.eps,
            heads_BHPD.stride(0), heads_BHPD.stride(1), heads_BHPD.stride(2),
            RMS_SIZE=size, WIDTH=1 << (size - 1).bit_length(), HEADS=_HEADS, num_warps=2,
        )  # fmt: skip
        return out.transpose(1, 2)

    def rotate(
        self,
        query_BHPD: torch.Tensor,
        key_BKPD: torch.Tensor,
        cos_BPD: torch.Tensor,
        sin_BPD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys by their positions, in place."""
        batch, heads, length, size = query_BHPD.shape
        kv_heads, half = key_BKPD.shape[1], size // 2
        query_programs, key_programs = -(-heads // _HEADS), -(-kv_heads // _HEADS)
        # One angle per dimension and token, also where every row has the same.
        cos_BPD, sin_BPD = (x.expand(batch, length, size).contiguous() for x in (cos_BPD, sin_BPD))
        _kernels().rotate[(batch * length, query_programs + key_programs)](
            query_BHPD, key_BKPD, cos_BPD, sin_BPD, length, heads, kv_heads,
            query_BHPD.stride(0), query_BHPD.stride(1), query_BHPD.stride(2),
            key_BKPD.stride(0), key_BKPD.stride(1), key_BKPD.stride(2),
            HALF=half, WIDTH=1 << (half - 1).bit_length(), HEADS=_HEADS,
            QUERY_PROGRAMS=query_programs, num_warps=2,
        )  # fmt: skip
        return query_BHPD, key_BKPD

    def residual_linear(self, x_NI: torch.Tensor, linear: nn.Linear) -> Delta:
        """A projection whose result is added to the residual stream."""
        splits = splits_of(x_NI, linear)
        if splits is None:
            return super().residual_linear(x_NI, linear)
        return partial_product(_kernels(), x_NI, linear, splits)

    def mlp(self, y_NE: torch.Tensor, layer: LayerPlan) -> Delta:
        """The layer's MLP: a ReLU rides on the first product, a gate takes one kernel."""
        if layer.gate is None:
            return self.residual_linear(self._inner(y_NE, layer), layer.down)
        gate, up = self.project(y_NE, (layer.gate, layer.up))
        if layer.activation != "silu":
            inner = ACTIVATIONS[layer.activation](gate) * up
        else:
            tokens, size = gate.shape
            inner = gate.new_empty((tokens, size))
            _kernels().gated_silu[(tokens, -(-size // _GATED_BLOCK))](
                gate, up, inner, gate.stride(0), up.stride(0), size, WIDTH=_GATED_BLOCK,
                num_warps=4,
            )  # fmt: skip
        return self.residual_linear(inner, layer.down)

    def _inner(self, y_NE: torch.Tensor, layer: LayerPlan) -> torch.Tensor:
        weight, bias = layer.up.weight, layer.up.bias
        if layer.activation == "relu" and bias is not None:
            inner: torch.Tensor = torch._addmm_activation(bias, y_NE, weight.t())
            return inner
        return ACTIVATIONS[layer.activation](F.linear(y_NE, weight, bias))
