"""peft's adapter layers inside a model: finding them, and computing with the plain ones.

Shapes: I input features, O output features, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

# Of weights that are what they say; quantised ones are integers or 8-bit floats.
_FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class PlainAdapter:
    """A layer that computes W x + bias + scaling * B (A x), and nothing else.

    Attributes:
        base: the frozen layer, a Linear of any class or GPT-2's Conv1D.
        a_rI: [r, I] weight of A.
        b_Or: [O, r] weight of B.
        scaling: alpha / r, or alpha / sqrt(r).
    """

    base: Any
    a_rI: torch.Tensor
    b_Or: torch.Tensor
    scaling: float

    @property
    def can_fuse(self) -> bool:
        """Whether the base is known to multiply by its weight as it is: [O, I], Conv1D [I, O]."""
        return type(self.base) in (nn.Linear, Conv1D)

    def fused_weight(self) -> torch.Tensor:
        """The base's weight with the adapter's product added, in fp32 and the base's layout."""
        return fuse(
            self.base.weight.detach(),
            self.a_rI.detach(),
            self.b_Or.detach(),
            self.scaling,
            is_conv1d(self.base),
        )


def fuse(
    weight: torch.Tensor,
    a_rI: torch.Tensor,
    b_Or: torch.Tensor,
    scaling: float,
    transposed: bool,
) -> torch.Tensor:
    """W + scaling * B A.

    Args:
        weight: [O, I], or [I, O] if transposed.
        a_rI: [r, I].
        b_Or: [O, r].
        scaling: of the product.
        transposed: whether the weight is stored as Conv1D does.

    Returns:
        fp32 in the layout of `weight`: the sum is rounded once, by whoever stores it.
    """
    a, b = a_rI.float(), b_Or.float()
    left, right = (a.T, b.T) if transposed else (b, a)
    return torch.addmm(weight.float(), left, right, alpha=scaling)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer stores its weight transposed, as GPT-2's do."""
    return isinstance(layer, Conv1D)


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of everything in the model that an adapter changes.

    Args:
        model: any module; peft's wrapper around one as well.
    """
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield name, module


def plain_adapter(layer: Any) -> PlainAdapter | None:
    """The one active adapter of a layer, if its product is all that peft would add.

    Args:
        layer: one of `adapter_layers`.

    Returns:
        None where the adapter is off, merged, one of several, of a variant such as DoRA, with
        a bias or with dropout that is on, or where the base is quantised or an embedding: only
        peft's own forward then knows what to do.
    """
    if type(layer) is not LoraLinear or layer.disable_adapters or layer.merged:
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant:
        return None
    name = active[0]
    base, a, b = layer.get_base_layer(), layer.lora_A[name], layer.lora_B[name]
    dropout = layer.lora_dropout[name]
    dropping = dropout.training and getattr(dropout, "p", 0.0) > 0
    if not isinstance(base, nn.Linear | Conv1D) or b.bias is not None or dropping:
        return None
    if base.weight.dtype not in _FLOATS:
        return None
    return PlainAdapter(base, a.weight, b.weight, float(layer.scaling[name]))
