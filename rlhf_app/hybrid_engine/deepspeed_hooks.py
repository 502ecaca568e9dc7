"""DeepSpeed's forward hooks, taken off the module while it generates.

Under every ZeRO stage DeepSpeed hooks the root module: its throughput timer makes the host wait
for the device at each forward. ZeRO-3 also hooks every module, to fetch and release weights. A
rollout needs neither. Hooks of anyone else stay, and so does the order of all hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

_Hooks = MutableMapping[int, Callable[..., Any]]


@contextmanager
def suspended(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Take hooks out of their modules and put them back where they were. Nests.

    Hooks that come or go in between are kept as they are then.

    Args:
        handles: what registering the hooks returned; those already removed are skipped.
    """
    ours = {handle.id for handle in handles}
    places: dict[int, _Hooks] = {}
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None:
            places[id(hooks)] = hooks
    before = [(hooks, dict(hooks)) for hooks in places.values()]
    try:
        for hooks, _ in before:
            for key in ours & hooks.keys():
                del hooks[key]
        yield
    finally:
        for hooks, old in before:
            restored = {k: hook for k, hook in old.items() if k in ours or k in hooks}
            restored.update(hooks)  # keeps places, adds newcomers at the end
            hooks.clear()
            hooks.update(restored)


def engine_hooks(engine: Any) -> list[RemovableHandle]:
    """Handles of the forward hooks that a DeepSpeed engine put on its module.

    Args:
        engine: what `deepspeed.initialize` returned.
    """
    handles = [engine.module_forward_pre_hook, engine.module_forward_post_hook]
    if engine.zero_optimization_stage() >= 3:
        offload = parameter_offload(engine)
        handles += [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]
    return [handle for handle in handles if handle is not None]


def parameter_offload(engine: Any) -> Any:
    """DeepSpeed's manager of ZeRO-3 parameters.

    Args:
        engine: of ZeRO stage 3.
    """
    # An engine without an optimizer has the manager itself in that place.
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer)
