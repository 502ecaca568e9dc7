"""A fused decoder whose forwards on the CPU are one call of compiled code each.

A small model's decode step is hundreds of operations of a few microseconds each: calling them
costs more than they do. Here one call takes tokens from their ids to their logits.
Models whose layers outgrow the processor's caches keep torch's matrix products, which block for
memory, and only their attention is compiled (`cpu_decode`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from rlhf_app.hybrid_engine.attention import Prefill, Step
from rlhf_app.hybrid_engine.cpu_decode import CpuDecode
from rlhf_app.hybrid_engine.fused.compiled import shared_out
from rlhf_app.hybrid_engine.fused.decoder import FusedDecoder
from rlhf_app.hybrid_engine.fused.ops_torch import TorchOps
from rlhf_app.hybrid_engine.fused.plan import DecoderPlan, LayerPlan, Norm
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace

# Weights of a layer: up to 4 MiB it stays in a core's caches while 16 rows pass.
LARGEST_LAYER = 1 << 20
_LANES = 16  # rows that are computed side by side
_ACTIVATIONS = ("relu", "silu", "gelu", "gelu_new")  # as forward.h numbers them
# Rotations whose angles depend on the position alone.
_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
_LONG = 8  # bytes

_POINTER, _INTEGER, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("eps", _DOUBLE), ("rms", _INTEGER))


class _Linear(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("in_", _INTEGER), ("out", _INTEGER))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, _Linear) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, _INTEGER) for name in ("activation", "heads", "kv_heads", "size")),
        ("scale", _DOUBLE),
        ("window", _INTEGER),
        ("keys", _POINTER),
        ("values", _POINTER),
        *((name, _INTEGER) for name in ("key_slot", "key_head", "value_slot", "value_head")),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("embedding", _POINTER),
        ("positions", _POINTER),
        ("features", _INTEGER),
        ("vocabulary", _INTEGER),
        ("offset", _INTEGER),
        ("norm", _Norm),
        ("head", _Linear),
    )


def suits(plan: DecoderPlan) -> bool:
    """Whether a model's decode step is worth one call of compiled code.

    Args:
        plan: of a fp32 model on the CPU.
    """
    if plan.rotary is not None:
        if getattr(plan.rotary, "rope_type", None) not in _FIXED_ROTATIONS:
            return False
        if len({layer.head_dim for layer in plan.layers}) > 1:
            return False
    return plan.embed_scale == 1.0 and all(
        sum(linear.weight.numel() for linear in _linears(layer)) <= LARGEST_LAYER
        for layer in plan.layers
    )


class CompiledDecoder(FusedDecoder):
    """See `FusedDecoder`; fp32 on the CPU.

    Args:
        plan: one that `suits`.
        kernels: from `compiled.load`.
    """

    def __init__(self, plan: DecoderPlan, kernels: ctypes.CDLL) -> None:
        super().__init__(plan, TorchOps())
        self._kernels = kernels
        self._workspace: KVWorkspace | None = None

    def begin(self) -> None:
        """Start a session: weights may be elsewhere than in the last one, and changed."""
        self._workspace = None

    def __call__(
        self,
        ids_BP: torch.Tensor,
        positions_BP: torch.Tensor,
        step: Step,
        last_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run prompts, or one token per row; see `FusedDecoder`."""
        if isinstance(step, CpuDecode):
            return self._decode(ids_BP, positions_BP, step)
        if isinstance(step, Prefill) and last_B is not None:
            return self._prefill(ids_BP, positions_BP, step, last_B)
        return super().__call__(ids_BP, positions_BP, step, last_B)

    def decode_step(
        self, workspace: KVWorkspace, slots_B: torch.Tensor, lengths_B: torch.Tensor, longest: int
    ) -> Step:
        """See `FusedDecoder`."""
        return CpuDecode(self._kernels, workspace, slots_B, lengths_B)

    def _decode(
        self, ids_BP: torch.Tensor, positions_BP: torch.Tensor, step: CpuDecode
    ) -> torch.Tensor:
        """One token per row, 16 rows side by side."""
        rows = len(ids_BP)
        bounds = [*range(0, rows, _LANES), rows]
        tokens = ids_BP.reshape(-1), positions_BP.reshape(-1), step.slots_B, torch.arange(rows)
        return self._run(step.workspace, tokens, bounds, rows)

    def _prefill(
        self,
        ids_BP: torch.Tensor,
        positions_BP: torch.Tensor,
        step: Prefill,
        last_B: torch.Tensor,
    ) -> torch.Tensor:
        """Prompts without their padding, each row's tokens side by side."""
        rows, length = ids_BP.shape
        slots_B = step.slots
        if isinstance(slots_B, slice):
            slots_B = torch.arange(slots_B.start, slots_B.stop)
        step.workspace.check(int(slots_B.max()) + 1, length)
        real_BP = torch.arange(length) <= last_B[:, None]
        row_BP = torch.where(
            torch.arange(length) == last_B[:, None], torch.arange(rows)[:, None], -1
        )
        slots_BP = slots_B[:, None].expand(rows, length)
        tokens = tuple(x[real_BP] for x in (ids_BP, positions_BP, slots_BP, row_BP))
        bounds = [0, *(last_B + 1).cumsum(0).tolist()]
        return self._run(step.workspace, tokens, bounds, rows)

    def _run(
        self,
        workspace: KVWorkspace,
        tokens: tuple[torch.Tensor, ...],
        bounds: list[int],
        rows: int,
    ) -> torch.Tensor:
        """[B, V] logits of tokens.

        Args:
            workspace: where keys and values are.
            tokens: ids, positions, slots and rows of the logits, [N] int64 each.
            bounds: first token of each part that one thread has to run alone, and N.
            rows: B.
        """
        if self._workspace is not workspace:
            self._read(workspace)
        logits_BV = torch.empty((rows, self.plan.head.out_features))
        whole = [x.contiguous() for x in tokens]
        starts, out = [x.data_ptr() for x in whole], logits_BV.data_ptr()

        def run(part: int, parts: int) -> int:
            first, end = bounds[part], bounds[part + parts]
            beyond: int = self._kernels.forward(
                ctypes.byref(self._decoder), self._layers, len(self._layers),
                *(start + first * _LONG for start in starts), *self._angles,
                end - first, self._limit, out,
            )  # fmt: skip
            return beyond

        parts = len(bounds) - 1
        work = max(bounds[-1], _LANES * parts) * self._weights
        if any(token >= 0 for token in shared_out(run, parts, work)):
            raise IndexError(
                f"a token id beyond the vocabulary of {self.plan.embedding.num_embeddings}, or a "
                f"position beyond the {self._limit} of KV workspace and model"
            )
        return logits_BV

    def _read(self, workspace: KVWorkspace) -> None:
        """Note where everything is, for the session."""
        plan = self.plan
        learned = plan.positions
        self._decoder = _Decoder(
            plan.embedding.weight.data_ptr(),
            None if learned is None else learned.module.weight.data_ptr(),
            plan.embedding.embedding_dim,
            plan.embedding.num_embeddings,
            0 if learned is None else learned.offset,
            _norm(plan.final_norm),
            _linear(plan.head),
        )
        layers = [_layer(layer, workspace) for layer in plan.layers]
        self._layers = (_Layer * len(layers))(*layers)
        linears = [plan.head, *(linear for layer in plan.layers for linear in _linears(layer))]
        self._weights = sum(linear.weight.numel() for linear in linears)
        self._limit = workspace.positions
        if learned is not None:
            self._limit = min(self._limit, learned.module.num_embeddings - learned.offset)
        self._angles: tuple[int | None, int | None] = (None, None)
        if plan.rotary is not None:
            every = torch.arange(workspace.positions)[None]
            cos, sin = plan.rotary(plan.embedding.weight, every)
            self._tables = cos.contiguous(), sin.contiguous()
            self._angles = self._tables[0].data_ptr(), self._tables[1].data_ptr()
        self._workspace = workspace


def _linears(layer: LayerPlan) -> list[nn.Linear]:
    parts = layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down
    return [part for part in parts if part is not None]


def _layer(layer: LayerPlan, workspace: KVWorkspace) -> _Layer:
    keys, values = workspace.keys[layer.index], workspace.values[layer.index]
    return _Layer(
        _norm(layer.input_norm), _norm(layer.query_norm), _norm(layer.key_norm),
        _norm(layer.mlp_norm), _linear(layer.query), _linear(layer.key), _linear(layer.value),
        _linear(layer.output), _linear(layer.gate), _linear(layer.up), _linear(layer.down),
        _ACTIVATIONS.index(layer.activation), layer.heads, layer.kv_heads, layer.head_dim,
        layer.scale, layer.window or 0, keys.data_ptr(), values.data_ptr(), keys.stride(0),
        keys.stride(1), values.stride(0), values.stride(1),
    )  # fmt: skip


def _norm(norm: Norm | None) -> _Norm:
    if norm is None:
        return _Norm()
    module: Any = norm.module
    bias = module.bias if norm.kind == "layer" else None
    bias = None if bias is None else bias.data_ptr()
    return _Norm(module.weight.data_ptr(), bias, norm.eps, norm.kind == "rms")


def _linear(linear: nn.Linear | None) -> _Linear:
    if linear is None:
        return _Linear()
    bias = None if linear.bias is None else linear.bias.data_ptr()
    return _Linear(linear.weight.data_ptr(), bias, linear.in_features, linear.out_features)
