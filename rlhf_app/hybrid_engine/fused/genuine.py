"""Whether a module computes what its class says, and nothing else around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

_LIBRARIES = ("torch.", "transformers.")
# transformers' own recorders of hidden states: they stay after their first use, and do nothing
# in a forward that nobody asked to record.
_RECORDER = "transformers.utils.output_capturing"


class NotUnderstood(Exception):
    """A model that no plan describes; the text says why in a few words."""


def genuine(module: Any, package: str, name: str) -> Any:
    """The module, if it is what its class was written to be.

    Args:
        module: what is looked at.
        package: module path of the class.
        name: of the class.

    Raises:
        NotUnderstood: another class, a replaced forward, hooks, or training mode.
    """
    kind = type(module)
    if kind.__module__ != package or kind.__qualname__ != name:
        library = kind.__module__.split(".")[0]
        raise NotUnderstood(f"{kind.__name__} of {library} in the place of {name}")
    if "forward" in module.__dict__ or not _as_written(kind.forward):
        raise NotUnderstood(f"{name} has a replaced forward")
    if _foreign(module._forward_hooks) or module._forward_pre_hooks:
        raise NotUnderstood(f"{name} has forward hooks")
    if module.training:
        raise NotUnderstood(f"{name} is in training mode")
    return module


def no_global_hooks() -> None:
    """Check torch's hooks of all modules.

    Raises:
        NotUnderstood: there are some.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise NotUnderstood("forward hooks of all modules")


def linear(module: Any) -> nn.Linear:
    """The module, if it is a plain linear layer with a whole weight.

    Raises:
        NotUnderstood: it is not.
    """
    found: nn.Linear = genuine(module, "torch.nn.modules.linear", "Linear")
    if found.weight.shape != (found.out_features, found.in_features):
        raise NotUnderstood("weights that are not whole")
    return found


def embedding(module: Any) -> nn.Embedding:
    """The module, if it is a plain embedding with a whole weight.

    Raises:
        NotUnderstood: it is not.
    """
    found: nn.Embedding = genuine(module, "torch.nn.modules.sparse", "Embedding")
    whole_table(found)
    return found


def whole_table(table: nn.Embedding) -> None:
    """Check the table of an embedding.

    Raises:
        NotUnderstood: it is not whole, or lookups renormalise it.
    """
    if table.weight.shape != (table.num_embeddings, table.embedding_dim):
        raise NotUnderstood("weights that are not whole")
    if table.max_norm is not None:
        raise NotUnderstood("an embedding with max_norm")


def one_kind(modules: Iterable[nn.Module]) -> None:
    """Check that all parameters are plain contiguous tensors of one dtype on one device.

    Raises:
        NotUnderstood: they are not.
    """
    kinds = set()
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if type(parameter) not in (nn.Parameter, torch.Tensor):
                raise NotUnderstood(f"weights of type {type(parameter).__name__}")
            if not parameter.is_contiguous():
                raise NotUnderstood("weights that are not contiguous in memory")
            kinds.add((parameter.dtype, parameter.device))
    if len(kinds) != 1:
        raise NotUnderstood("weights of several dtypes or devices")
    dtype, _ = kinds.pop()
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise NotUnderstood(f"weights of dtype {dtype}")


def _foreign(hooks: dict[int, Callable[..., Any]]) -> bool:
    return any(getattr(hook, "__module__", None) != _RECORDER for hook in hooks.values())


def _as_written(function: Any) -> bool:
    """Whether a method and every wrapper around it come from the libraries."""
    while function is not None:
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith(_LIBRARIES):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
