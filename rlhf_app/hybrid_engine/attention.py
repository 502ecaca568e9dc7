"""Attention over the KV workspace, called by the model's own layers while it generates.

Shapes: B rows, H query heads, K kv heads, G = H / K, P prompt tokens, L live positions, D head
size.

transformers looks its attention up by name in `config._attn_implementation`. `installed`
puts our name there; the function finds what to do (`Prefill`, `Decode` or `Probe`) in a
context variable, so no argument has to travel through the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_app.hybrid_engine import decode_kernel
from rlhf_app.hybrid_engine.alibi import Alibi
from rlhf_app.hybrid_engine.attention_math import attend, attend_rounded, banded_causal
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace
from rlhf_app.hybrid_engine.temporarily import temporarily

NAME = "rlhf_kv_workspace"


class Step(Protocol):
    """One forward of the model, as the attention layers see it."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Serve one layer: [B, H, P, D] queries in, [B, H, P, D] out."""
        ...


@dataclass(slots=True)
class AttentionCall:
    """One layer's request.

    Attributes:
        layer: index of the layer.
        query: [B, H, P, D].
        key: [B, K, P, D] of the new tokens.
        value: [B, K, P, D] of the new tokens.
        mask: what the model passed; None from every model the engine accepts.
        scale: of the logits.
        window: keys a query sees, itself included; None is all.
        softcap: c in c*tanh(logits/c), or None.
        extras: every other keyword the model passed.
        alibi: bias of key positions, added to the scaled and capped logits; or None.
        rounded: the model's own forward rounds the logits, bias included, to the type of the
            query before the softmax. Near a bias of 500, bfloat16 then keeps multiples of 2.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    extras: dict[str, Any]
    alibi: Alibi | None = None
    rounded: bool = False


_STEP: ContextVar[Step | None] = ContextVar("rlhf_attention_step", default=None)


def workspace_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over the active step.

    Args:
        module: the attention layer; its `layer_idx` selects the cache.
        query: [B, H, P, D] of the new tokens.
        key: [B, K, P, D].
        value: [B, K, P, D].
        attention_mask: must be None: the step knows which positions count.
        scaling: of the logits; None is D**-0.5.
        dropout: 0 outside training, and generation is outside training.
        sliding_window: keys a query sees, itself included.
        softcap: see `AttentionCall`.
        extras: anything else; refused by the probe when it would change the result.

    Returns:
        ([B, P, H, D], None).

    Raises:
        RuntimeError: called outside `active`.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(
        module.layer_idx, query, key, value, attention_mask, scale, sliding_window, softcap,
        {"dropout": dropout, **extras},
    )  # fmt: skip
    return serve(call).transpose(1, 2), None


def serve(call: AttentionCall) -> torch.Tensor:
    """Have the active step serve one layer.

    Args:
        call: what the layer asks for.

    Returns:
        [B, H, P, D].

    Raises:
        RuntimeError: called outside `active`.
    """
    step = _STEP.get()
    if step is None:
        raise RuntimeError(f"attention {NAME!r} was called outside a rollout")
    return step.attend(call)


# No mask function is registered under this name: transformers then builds no mask at all,
# which saves its work on every step. `capability` checks beforehand which masks a model wants.
ALL_ATTENTION_FUNCTIONS.register(NAME, workspace_attention)


@contextmanager
def installed(configs: list[Any], name: str = NAME) -> Iterator[None]:
    """Route the attention of the models with these configs here; restore on exit.

    Args:
        configs: every distinct config object among the model's modules.
        name: a registered attention.
    """
    with temporarily(configs, "_attn_implementation", name):
        yield


@contextmanager
def active(step: Step) -> Iterator[None]:
    """Make `step` the one that attention layers are served by."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


@dataclass(slots=True)
class Prefill:
    """Prompts, right-padded to one length, into their slots.

    Padding comes after every real token, so causal attention keeps it out of them; its keys
    land beyond the row's length, where decoding overwrites them before it reads them.

    Attributes:
        workspace: where keys and values go.
        slots: their slots, consecutive or listed in an int64 tensor.
    """

    workspace: KVWorkspace
    slots: slice | torch.Tensor

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the prompts' keys and values; attend causally among the prompt tokens."""
        length = call.key.shape[2]
        last = self.slots.stop if isinstance(self.slots, slice) else self.workspace.slots
        self.workspace.check(last, length)
        self._store(call, length)
        groups = call.query.shape[1] // call.key.shape[1]
        window = call.window if call.window is not None and call.window < length else None
        plain = call.softcap is None and window is None and call.alibi is None
        if plain and call.query.is_cuda:
            return F.scaled_dot_product_attention(
                call.query, call.key, call.value, is_causal=True, scale=call.scale,
                enable_gqa=groups > 1,
            )  # fmt: skip
        key, value = call.key, call.value
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if plain:
            return F.scaled_dot_product_attention(
                call.query, key, value, is_causal=True, scale=call.scale
            )
        mask = banded_causal(length, window, call.query)
        bias = None
        if call.alibi is not None:
            bias = call.alibi.table(length)[:, None].to(mask.dtype)
        if call.rounded and bias is not None:
            return attend_rounded(call.query, key, value, mask, bias, call.scale)
        mask = mask if bias is None else mask + bias
        return attend(call.query, key, value, mask, call.scale, call.softcap)

    def _store(self, call: AttentionCall, length: int) -> None:
        keys, values = self.workspace.keys[call.layer], self.workspace.values[call.layer]
        same = call.key.dtype == keys.dtype and call.value.dtype == values.dtype
        sizes = call.key.shape[-1], call.value.shape[-1]
        if same and decode_kernel.available(keys.device, *sizes):
            decode_kernel.store_prompts(call.key, call.value, keys, values, self.slots)
            return
        keys[self.slots, :, :length] = call.key
        values[self.slots, :, :length] = call.value


@dataclass(slots=True)
class Decode:
    """One new token for each of the first B slots.

    Attributes:
        workspace: where keys and values are.
        lengths_B: [B] int64, tokens already stored; the new one goes to this position.
        longest: upper bound of `lengths_B` known to the host.
        equal: every live row has length `longest`: no mask and no scatter are needed.
    """

    workspace: KVWorkspace
    lengths_B: torch.Tensor
    longest: int
    equal: bool
    _rows: torch.Tensor = field(init=False)
    _masks: dict[int | None, torch.Tensor | None] = field(init=False, default_factory=dict)
    _biased: dict[tuple[int | None, Alibi], torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.workspace.check(self.lengths_B.shape[0], self.longest + 1)
        self._rows = torch.arange(self.lengths_B.shape[0], device=self.lengths_B.device)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the new key and value, then attend over the row so far."""
        rows, heads, _, _ = call.query.shape
        kv_heads = call.key.shape[1]
        keys = self.workspace.keys[call.layer]
        values = self.workspace.values[call.layer]
        end = self.longest + 1
        if self.equal:
            keys[:rows, :, self.longest] = call.key[:, :, 0]
            values[:rows, :, self.longest] = call.value[:, :, 0]
            start = 0 if call.window is None else max(0, end - call.window)
        else:
            # Under autocast keys may come in another type than the workspace's.
            keys[self._rows, :, self.lengths_B] = call.key[:, :, 0].to(keys.dtype)
            values[self._rows, :, self.lengths_B] = call.value[:, :, 0].to(values.dtype)
            start = 0
        # The queries of one kv head become rows of one small matrix: no copy of K and V.
        query = call.query.reshape(rows, kv_heads, heads // kv_heads, -1)
        key, value = keys[:rows, :, start:end], values[:rows, :, start:end]
        mask = self._mask(call.window, query.dtype)
        if call.alibi is None:
            out = attend(query, key, value, mask, call.scale, call.softcap)
        else:
            bias = call.alibi.table(end)[:, start:].to(query.dtype)
            bias = bias.reshape(kv_heads, -1, bias.shape[1])
            if call.rounded:
                out = attend_rounded(query, key, value, mask, bias, call.scale)
            else:
                mask = self._with_bias(call, mask, bias)
                out = attend(query, key, value, mask, call.scale, call.softcap)
        return out.reshape(rows, heads, 1, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """[B, 1, 1, L] additive, or None where every position that is looked at counts."""
        if self.equal:
            return None
        if window is not None and window > self.longest:
            window = None
        if window not in self._masks:
            self._masks[window] = self._hidden(window, dtype)
        return self._masks[window]

    def _with_bias(
        self, call: AttentionCall, mask: torch.Tensor | None, bias: torch.Tensor
    ) -> torch.Tensor:
        """Their sum [B or 1, K, G, L], the same for all layers of one window."""
        assert call.alibi is not None
        kept = self._biased.get((call.window, call.alibi))
        if kept is None:
            kept = bias[None] if mask is None else mask + bias
            self._biased[call.window, call.alibi] = kept
        return kept

    def _hidden(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, 1, L] additive: 0 where a position counts, -inf elsewhere."""
        position = torch.arange(self.longest + 1, device=self.lengths_B.device)
        hidden = position > self.lengths_B[:, None]
        if window is not None:
            hidden |= position <= self.lengths_B[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, -math.inf)[:, None, None]
