"""Can this model generate through the KV workspace? Asked of the model, not of its name.

A two-token forward must call our attention exactly once per layer, with arguments that it
can honour and masks that it reproduces. Some families never call it, without any error:
`adapters` brings some of them to it, the others (MPT) stay outside. Others keep part of their
state elsewhere (linear attention, or a state-space mixer beside the attention of every layer).
So a few tokens are then decoded and their logits compared with those of the training forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import adapters, mask_window
from rlhf_app.hybrid_engine.attention import AttentionCall, Decode, Prefill, workspace_attention
from rlhf_app.hybrid_engine.host_reads import HostReads
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace, LayerShape
from rlhf_app.hybrid_engine.positions import batch_dependent_from, most_positions
from rlhf_app.hybrid_engine.rounding import disagreement, tolerance

_PROBE = "rlhf_kv_workspace_probe"

# Keywords that layers pass along and that change nothing in what attention computes.
_HARMLESS = frozenset(
    {
        "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions",
        "output_hidden_states", "return_dict", "position_embeddings",
    }
)  # fmt: skip
_ATTENTION_KINDS = frozenset({"attention", "full_attention", "sliding_attention"})
# Tokens of the numeric check, the last two of them decoded one by one.
_CHECK_TOKENS = 8
_TEXT_LENGTH = 120


class Unsupported(Exception):
    """The model needs something that the workspace attention does not do."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one attention layer asked for.

    Attributes:
        query_heads: more than the kv heads under GQA.
        window: keys a query sees, itself included; None is all.
        softcap: of the logits, or None.
        biased: positions come as a bias (ALiBi).
    """

    query_heads: int
    window: int | None
    softcap: float | None
    biased: bool


@dataclass(frozen=True, slots=True)
class Capability:
    """What the probe found.

    Attributes:
        layers: what each attention layer stores; empty when unsupported.
        missing: the missing capability in words, or None when everything is there.
        max_positions: most tokens of a row that the model takes, or None when unlimited.
        engine_positions: beyond this a row needs native generate, or None when unlimited.
        attention: what each attention layer asked for; empty when unsupported.
        adapted: the layers are served by an attention adapter, not through transformers'
            attention interface.
        host_read: first operation of a decode step that makes the host wait for the device,
            which no CUDA graph can hold; None when there is none.
        final: False where the forward raised: out of memory, or a hook, may not do so again.
    """

    layers: tuple[LayerShape, ...] = ()
    missing: str | None = None
    max_positions: int | None = None
    engine_positions: int | None = None
    attention: tuple[LayerAttention, ...] = ()
    adapted: bool = False
    host_read: str | None = None
    final: bool = True


def probe(model: InferenceModel) -> Capability:
    """Run the two-token forward and the numeric check.

    Args:
        model: the model asked; it is left as it was.

    Returns:
        Shapes to size a workspace with, or what is missing.
    """
    limit = most_positions(model.text_config)
    try:
        recorder = _probe(model)
        layers = tuple(recorder.shapes[layer] for layer in sorted(recorder.shapes))
        reads = _check_numbers(model, layers, min(_CHECK_TOKENS, limit or _CHECK_TOKENS))
        return Capability(
            layers,
            max_positions=limit,
            engine_positions=batch_dependent_from(model.text_config),
            attention=tuple(recorder.found[layer] for layer in sorted(recorder.found)),
            adapted=adapters.needed(model.model),
            host_read=reads.first,
        )
    except Unsupported as error:
        return Capability((), str(error), limit)
    except Exception as error:  # whatever a model of an unknown family raises
        text = " ".join(str(error).split())
        if len(text) > _TEXT_LENGTH:
            text = text[: _TEXT_LENGTH - 3] + "..."
        missing = f"a forward that runs over the workspace ({type(error).__name__}: {text})"
        return Capability((), missing, limit, final=False)


def require_decoder_only(model: InferenceModel) -> None:
    """Refuse a model whose answers do not continue its prompts.

    Args:
        model: the model asked to roll out.

    Raises:
        ConfigError: it has an encoder.
    """
    if model.model.config.is_encoder_decoder:
        raise ConfigError(
            f"rollout: model type {model.model.config.model_type!r} is an encoder-decoder, whose "
            "answers do not continue its prompts: give a decoder-only model"
        )


def keeps_state(model: InferenceModel) -> bool:
    """Whether rows carry a state from token to token outside the attention's keys and values.

    Args:
        model: any causal LM.
    """
    kinds = getattr(model.text_config, "layer_types", None) or ["unknown"]
    return getattr(model.model, "_is_stateful", False) and bool(set(kinds) - _ATTENTION_KINDS)


def _probe(model: InferenceModel) -> _Recorder:
    if model.model.config.is_encoder_decoder:
        raise Unsupported("a decoder without an encoder")
    if model.model.get_output_embeddings() is None:
        raise Unsupported("an output embedding that get_output_embeddings() returns")
    if keeps_state(model):
        # The numeric check may miss it in a fresh model, where the state weighs little.
        raise Unsupported("a state of attention keys and values alone")
    if not model.takes_positions and not adapters.needed(model.model):
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
    if not model.takes_positions and not all(found.biased for found in recorder.found.values()):
        raise Unsupported("a forward that takes position_ids, or positions in the attention alone")
    return recorder


def _check_numbers(model: InferenceModel, layers: tuple[LayerShape, ...], length: int) -> HostReads:
    """Compare prefill and decode with the training forward, on two rows of unlike lengths."""
    reads = HostReads()
    if length < 4:
        return reads
    vocabulary = model.input_vocabulary
    ids = [[(5 + 7 * i + 3 * row) % vocabulary for i in range(length)] for row in range(2)]
    ids_BP = torch.tensor(ids, device=model.device)
    rows = torch.arange(2, device=model.device)
    lengths_B = torch.tensor([length - 2, length - 3], device=model.device)
    with model.weights.uncut(), model.evaluation():
        trained = model.model(
            input_ids=ids_BP, attention_mask=torch.ones_like(ids_BP), use_cache=False,
            return_dict=True,
        ).logits  # fmt: skip
    workspace = KVWorkspace(layers, model.kv_dtype, model.device)
    workspace.borrow(2, length)
    with model.session():
        got = [model.prefill(ids_BP[:, : length - 2], lengths_B, Prefill(workspace, slice(0, 2)))]
        for step in range(2):
            at_B = lengths_B + step
            decode = Decode(workspace, at_B, length - 2 + step, equal=False)
            with reads:
                got.append(model.decode(ids_BP[rows, at_B], at_B, decode))
    want = torch.stack([trained[rows, lengths_B - 1 + step] for step in range(3)])
    allowed = max(tolerance(model.dtype), tolerance(trained.dtype))
    worst = disagreement(torch.stack(got), want, allowed)
    if worst is not None:
        raise Unsupported(
            f"decoded logits equal to the training forward's (they differ by {worst:.2g} of "
            "their size: part of the state may live outside the attention)"
        )
    return reads


@dataclass(slots=True)
class _Recorder:
    """A step that notes every call and refuses what it could not honour."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    found: dict[int, LayerAttention] = field(default_factory=dict)

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
        if call.mask is not None:
            window = mask_window.read(call.mask)
            if window is mask_window.OTHER:
                raise Unsupported("a causal attention mask that depends on positions alone")
            if window != call.window:
                raise Unsupported(f"a mask of window {window} with sliding_window={call.window}")
        self.found[call.layer] = LayerAttention(
            call.query.shape[1], call.window, call.softcap, call.alibi is not None
        )
        self.shapes[call.layer] = LayerShape(
            call.key.shape[1], call.key.shape[3], call.value.shape[3]
        )
        return call.query.new_zeros((*call.query.shape[:3], call.value.shape[3]))


def _is_absent(value: object) -> bool:
    """Whether a keyword is None, False, or a zero such as dropout=0.0."""
    return value is None or (isinstance(value, bool | int | float) and not value)


ALL_ATTENTION_FUNCTIONS.register(_PROBE, workspace_attention)
mask_window.register(_PROBE)
