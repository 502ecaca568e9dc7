"""Can this model generate through the KV workspace? Asked of the model, not of its name.

A two-token forward must call our attention exactly once per layer, with arguments that it
can honour and masks that it reproduces. Some families never call it, without any error
(GPT-Neo, BLOOM, Falcon, MPT); others keep part of their state elsewhere (linear attention).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_app.hybrid_engine.attention import AttentionCall, workspace_attention
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import LayerShape

_PROBE = "rlhf_kv_workspace_probe"

# Keywords that layers pass along and that change nothing in what attention computes.
_HARMLESS = frozenset(
    {
        "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions",
        "output_hidden_states", "return_dict", "position_embeddings",
    }
)  # fmt: skip
# RoPE whose table depends on the longest row of the batch: cached keys would turn stale.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class Unsupported(Exception):
    """The model needs something that the workspace attention does not do."""


@dataclass(frozen=True, slots=True)
class Capability:
    """What the probe found.

    Attributes:
        layers: what each attention layer stores; empty when unsupported.
        missing: the missing capability in words, or None when everything is there.
        max_positions: most tokens of a row that the model takes, or None when unlimited.
        engine_positions: beyond this a row needs native generate, or None when unlimited.
    """

    layers: tuple[LayerShape, ...] = ()
    missing: str | None = None
    max_positions: int | None = None
    engine_positions: int | None = None


def probe(model: InferenceModel) -> Capability:
    """Run the two-token forward.

    Args:
        model: the model asked; it is left as it was.

    Returns:
        Shapes to size a workspace with, or what is missing.
    """
    limit: int | None = getattr(model.text_config, "max_position_embeddings", None)
    try:
        return Capability(_probe(model), None, limit, _engine_positions(model))
    except Unsupported as error:
        return Capability((), str(error), limit)


def _probe(model: InferenceModel) -> tuple[LayerShape, ...]:
    if model.model.get_output_embeddings() is None:
        raise Unsupported("an output embedding that get_output_embeddings() returns")
    if not model.takes_positions:
        raise Unsupported("a forward that takes position_ids")
    recorder = _Recorder()
    ids = torch.tensor([[0, 1]], device=model.device)
    with model.session(_PROBE):
        model.prefill(ids, torch.tensor([2], device=model.device), recorder)
    expected = model.text_config.num_hidden_layers
    if sorted(recorder.shapes) != list(range(expected)):
        raise Unsupported(
            f"attention through transformers' attention interface in every layer "
            f"({len(recorder.shapes)} of {expected} layers called it)"
        )
    return tuple(recorder.shapes[layer] for layer in range(expected))


@dataclass(slots=True)
class _Recorder:
    """A step that notes every call and refuses what it could not honour."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Note one call; the output's values do not matter, its shape does."""
        for name, value in call.extras.items():
            if name not in _HARMLESS and not _is_absent(value):
                raise Unsupported(f"attention argument {name!r}")
        if call.layer in self.shapes:
            raise Unsupported(f"one attention call per layer (layer {call.layer} called twice)")
        if call.key.shape[2] != 2:
            raise Unsupported("keys for the new tokens only")
        if call.query.shape[1] % call.key.shape[1]:
            raise Unsupported("query heads that are a multiple of the key heads")
        # A mask made by `_mask_window` is the window it stands for; 0 is no window.
        window = None if call.mask is None or not call.mask.item() else int(call.mask.item())
        if window != call.window and call.mask is not None:
            raise Unsupported(f"a mask of window {window} with sliding_window={call.window}")
        self.shapes[call.layer] = LayerShape(
            call.key.shape[1], call.key.shape[3], call.value.shape[3]
        )
        return call.query.new_zeros((*call.query.shape[:3], call.value.shape[3]))


def _is_absent(value: object) -> bool:
    """Whether a keyword is None, False, or a zero such as dropout=0.0."""
    return value is None or (isinstance(value, bool | int | float) and not value)


def _mask_window(*_: Any, mask_function: Any, **__: Any) -> torch.Tensor:
    """transformers' mask interface: the sliding window that a mask function stands for.

    Returns:
        int64 scalar: keys that a far query sees, itself included; 0 when it sees all.

    Raises:
        Unsupported: the function is no causal band.
    """
    far = 1 << 40

    def sees(distance: int) -> bool:
        zero = torch.tensor(0)
        query, key = torch.tensor(far), torch.tensor(far - distance)
        return bool(mask_function(zero, zero, query, key))

    try:
        if sees(-1) or not sees(0):
            raise Unsupported("a causal attention mask")
        low, high = 0, 1 << 32
        if sees(high):
            return torch.tensor(0)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sees(middle) else (low, middle)
    except (IndexError, TypeError, RuntimeError) as error:
        raise Unsupported(f"an attention mask of positions only ({error})") from error
    return torch.tensor(high)


def _engine_positions(model: InferenceModel) -> int | None:
    """Where a RoPE table starts to depend on the longest row of the batch, if it does."""
    rope = getattr(model.text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in _BATCH_DEPENDENT_ROPE:
        return None
    limit: int | None = rope.get("original_max_position_embeddings")
    return limit if limit is not None else model.text_config.max_position_embeddings


ALL_ATTENTION_FUNCTIONS.register(_PROBE, workspace_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE, _mask_window)
