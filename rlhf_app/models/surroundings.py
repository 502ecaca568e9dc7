"""What decides a module's output beside its weights: hooks, a replaced forward, the config.

Conclusions about a forward (what it returns, what a captured one computed) hold while these stay
as they were. Each function returns a value that is equal then.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn


def hooks_of(module: nn.Module) -> Hashable:
    """The module's forward hooks and its replaced forward, by identity.

    Args:
        module: itself; its children are not looked at.
    """
    hooks = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
    return tuple((key, id(hook)) for key, hook in hooks), id(module.__dict__.get("forward"))


def hooks_within(module: nn.Module) -> Hashable:
    """The forward hooks of a module and of all in it, where there are some.

    Args:
        module: the whole. Replaced forwards are not looked at.
    """
    found = []
    for name, part in module.named_modules():
        hooks = (*part._forward_pre_hooks.items(), *part._forward_hooks.items())
        found += [(name, key, id(hook)) for key, hook in hooks]
    return tuple(found)


def values_of(config: Any) -> Hashable:
    """The values of a transformers config.

    Args:
        config: None gives None.
    """
    if config is None:
        return None
    return repr(sorted(vars(config).items(), key=lambda item: item[0]))
