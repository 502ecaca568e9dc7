"""How a model's weights are cut for tensor-parallel rollouts (Megatron-LM, arXiv:1909.08053).

The plan comes from transformers, where the model has one, else from a table here. Layers
between a column-wise and a row-wise weight see 1/TP of the heads or of the hidden units, and
the row-wise outputs are partial sums. Everything else stays whole on every rank: embeddings,
norms, the head, and whatever a plan gathers again right behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# Styles of transformers' plans that leave a module whole. A plan gathers the output where the
# model splits or normalises it over all heads; whole weights give the same output.
_WHOLE = frozenset(
    {
        "embedding_rowwise", "embedding_colwise", "colwise_gather_output", "colwise_rep",
        "rowwise_split_input", "rowwise_rep", "replicate", "replicated_with_grad_allreduce",
    }
)  # fmt: skip
# Styles whose module needs no cut of its own: its output is a partial sum.
_REDUCED = frozenset({"moe_tp_experts", "all_reduce"})
_PACKED = {"packed_colwise": 2, "packed_rowwise": 2}
# Projections that hold keys: where one is cut, heads are shared out.
_KEYS = frozenset({"k_proj", "qkv_proj", "query_key_value", "c_attn"})

# Tables for families without a plan in transformers, or with one that keeps attention whole.
_OPT = {
    "model.decoder.layers.*.self_attn.q_proj": "colwise",
    "model.decoder.layers.*.self_attn.k_proj": "colwise",
    "model.decoder.layers.*.self_attn.v_proj": "colwise",
    "model.decoder.layers.*.self_attn.out_proj": "rowwise",
    "model.decoder.layers.*.fc1": "colwise",
    "model.decoder.layers.*.fc2": "rowwise",
}
_GPT2 = {
    "transformer.h.*.attn.c_attn": "fused_qkv",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}
_PHI3 = {
    "model.layers.*.self_attn.qkv_proj": "fused_qkv",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
_TABLES = {"opt": _OPT, "gpt2": _GPT2, "phi3": _PHI3}
# Numbers that the attention modules split their tensors by.
_COUNTS = {
    "opt": ("num_heads",),
    "gpt2": ("split_size", "num_heads"),
    "phi3": ("num_key_value_heads", "config.num_attention_heads"),
}


class NotSliceable(Exception):
    """Why a model's rollouts cannot be shared out over ranks, in words."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One parameter, cut into equal parts.

    Attributes:
        module: path of the module that owns it.
        name: in the module.
        dim: that is cut.
        blocks: sizes along `dim` that are cut one by one, as in a fused q, k, v.
    """

    module: str
    name: str
    dim: int
    blocks: tuple[int, ...]

    def take(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """One rank's part: a view, or a copy where several blocks have to be joined.

        Args:
            whole: the parameter.
            rank: of the group.
            ranks: size of the group.
        """
        parts, start = [], 0
        for block in self.blocks:
            length = block // ranks
            parts.append(whole.narrow(self.dim, start + rank * length, length))
            start += block
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)


@dataclass(frozen=True, slots=True)
class SlicingPlan:
    """Everything that differs between a rank's sliced model and the whole one.

    Attributes:
        cuts: by path of the parameter.
        reduced: paths of modules whose outputs are partial sums over the ranks.
        once: paths of their biases, which one rank alone adds.
        divided: (path of the module, attribute, number of it): what the module's forward splits
            its tensors by; without a number the attribute itself is one.
    """

    cuts: dict[str, Cut]
    reduced: tuple[str, ...]
    once: tuple[str, ...]
    divided: tuple[tuple[str, str, str | None], ...]


def slicing_plan(model: PreTrainedModel, ranks: int) -> SlicingPlan:
    """Find the plan of a model.

    Args:
        model: whole or partitioned by ZeRO-3; only shapes are read.
        ranks: that share a rollout.

    Raises:
        NotSliceable: no plan, a style unknown here, heads or widths that do not divide, or
            layers wrapped by adapters.
    """
    kind = model.config.model_type
    styles = _TABLES.get(kind) or dict(getattr(model, "_tp_plan", None) or {})
    if set(styles.values()) <= _WHOLE:
        raise NotSliceable(f"model type {kind!r} has no tensor-parallel plan")
    modules = dict(model.named_modules())
    if any(hasattr(module, "lora_A") for module in modules.values()):
        raise NotSliceable("its layers carry LoRA adapters")
    config = model.config.get_text_config(decoder=True)
    cuts: dict[str, Cut] = {}
    reduced, once = [], []
    parameters = {name: _shape(weight) for name, weight in model.named_parameters()}
    for path, style in _resolved(styles, [*modules, *parameters]):
        if style in _WHOLE:
            continue
        if style not in _REDUCED:
            for cut in _cuts(path, style, modules, parameters, config):
                _check_width(cut, ranks)
                cuts[f"{cut.module}.{cut.name}"] = cut
        if style in _REDUCED or (style.endswith("rowwise") and path in modules):
            reduced.append(path)
            if f"{path}.bias" in parameters:
                once.append(f"{path}.bias")
    if any(cut.module.rpartition(".")[2] in _KEYS for cut in cuts.values()):
        _check_heads(config, ranks)
    if not cuts:
        raise NotSliceable(f"model type {kind!r} has no module that its plan names")
    divided = list(_attributes(_COUNTS.get(kind, ()), cuts))
    # A Conv1D writes its output in the width that it remembers.
    divided += [
        (cut.module, "nf", None)
        for cut in cuts.values()
        if isinstance(modules[cut.module], Conv1D) and (cut.name, cut.dim) == ("weight", 1)
    ]
    return SlicingPlan(cuts, tuple(reduced), tuple(once), tuple(divided))


def _shape(weight: torch.Tensor) -> tuple[int, ...]:
    """Of the whole parameter: ZeRO-3 leaves an empty one behind and notes its shape."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def _resolved(styles: dict[str, str], paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every (path, style) that the patterns stand for; * is a layer number."""
    generic: dict[str, list[str]] = {}
    for path in paths:
        generic.setdefault(re.sub(r"\b\d+\b", "*", path), []).append(path)
    for pattern, style in styles.items():
        for path in generic.get(pattern, ()):
            yield path, style


def _cuts(
    path: str,
    style: str,
    modules: dict[str, nn.Module],
    parameters: dict[str, tuple[int, ...]],
    config: Any,
) -> list[Cut]:
    """What one entry of the plan cuts: a parameter, or a linear layer's weight and bias."""
    if style not in {"colwise", "rowwise", "fused_qkv", *_PACKED}:
        raise NotSliceable(f"its plan asks for {style!r} at {path}")
    if path in parameters:
        owner, _, name = path.rpartition(".")
        shape = parameters[path]
        if len(shape) < 2:
            raise NotSliceable(f"{path} is no matrix")
        # As transformers does: the last two dimensions are (out, in).
        dim = len(shape) - (1 if style.endswith("rowwise") else 2)
        return [Cut(owner, name, dim, _blocks(style, shape[dim], config))]
    module = modules[path]
    if type(module) not in (nn.Linear, Conv1D):
        raise NotSliceable(f"{path} is a {type(module).__name__}, not a plain linear layer")
    out_dim = 0 if isinstance(module, nn.Linear) else 1
    dim = 1 - out_dim if style.endswith("rowwise") else out_dim
    width = parameters[f"{path}.weight"][dim]
    cuts = [Cut(path, "weight", dim, _blocks(style, width, config))]
    if dim == out_dim and f"{path}.bias" in parameters:
        cuts.append(Cut(path, "bias", 0, _blocks(style, width, config)))
    return cuts


def _blocks(style: str, width: int, config: Any) -> tuple[int, ...]:
    if style in _PACKED:
        return (width // _PACKED[style],) * _PACKED[style]
    if style == "fused_qkv":
        heads, kv_heads = _heads(config)
        head = width // (heads + 2 * kv_heads)
        return heads * head, kv_heads * head, kv_heads * head
    return (width,)


def _heads(config: Any) -> tuple[int, int]:
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None)
    return heads, heads if kv_heads is None else int(kv_heads)


def _check_heads(config: Any, ranks: int) -> None:
    heads, kv_heads = _heads(config)
    if heads % ranks or kv_heads % ranks:
        raise NotSliceable(
            f"its {heads} attention and {kv_heads} key-value heads do not divide by {ranks}"
        )


def _check_width(cut: Cut, ranks: int) -> None:
    if any(block % ranks for block in cut.blocks):
        width = " + ".join(map(str, cut.blocks))
        raise NotSliceable(f"{cut.module}.{cut.name} of width {width} does not divide by {ranks}")


def _attributes(
    names: Sequence[str], cuts: dict[str, Cut]
) -> Iterator[tuple[str, str, str | None]]:
    """The numbers to divide, of every module around a cut projection of keys."""
    owners = {
        cut.module.rpartition(".")[0]: None
        for cut in cuts.values()
        if cut.module.rpartition(".")[2] in _KEYS
    }
    for path in owners:
        for name in names:
            attribute, _, number = name.partition(".")
            yield path, attribute, number or None
