"""Attention adapters for families that do not use transformers' attention interface.

An adapter is one function that does what the family's attention forward does, with the part
between the projections served by the active step. It takes the place of `forward` on the
instances, never on the class, and only for the time of a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from rlhf_app.hybrid_engine.adapters import bloom, falcon, gpt_neo

_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    gpt_neo.ATTENTION: gpt_neo.forward,
    bloom.ATTENTION: bloom.forward,
    falcon.ATTENTION: falcon.forward,
}


def register(kind: type[nn.Module], forward: Callable[..., Any]) -> None:
    """Serve one more kind of attention layer; worked example in docs/hybrid_engine.md.

    Args:
        kind: the layers' class; a class that is known already gets the new forward.
        forward: called as forward(layer, *args, **kwargs) in place of the layer's own.
    """
    _FORWARDS[kind] = forward


def needed(model: nn.Module) -> bool:
    """Whether some layer of the model is served by an adapter.

    Args:
        model: any causal LM.
    """
    return bool(_layers(model))


@contextmanager
def installed(model: nn.Module) -> Iterator[None]:
    """Route the attention of families that need it to the active step; restore on exit.

    Args:
        model: any causal LM; most need nothing.
    """
    layers = _layers(model)
    # A forward that somebody put on the instance comes back; else the class's shows again.
    before = [layer.__dict__.get("forward") for layer, _ in layers]
    try:
        for layer, forward in layers:
            layer.__dict__["forward"] = partial(forward, layer)
        yield
    finally:
        for (layer, _), old in zip(layers, before, strict=True):
            if old is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = old


def _layers(model: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Every attention layer with an adapter, and that adapter."""
    return [
        (module, forward)
        for module in model.modules()
        for kind, forward in _FORWARDS.items()
        if isinstance(module, kind)
    ]
