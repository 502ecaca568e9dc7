"""Adapters while the model generates, and with adapters off the model it started from.

One base serves two policies: with its adapters it is the one that trains, without them the
reference (`adapter_off`). Rollouts run the adapted one in one of two modes:

- unfused: per layer the base's product, then one small product and one that adds to it, with
  the scaling folded in: two kernels more than the base alone, and nothing that a CUDA graph
  could not capture. peft's own forward takes six.
- fused: the adapters' product is added to the base's weights for the time of the session, and
  the weights are copied back afterwards. No subtraction, which would leave rounding errors
  behind. In bf16 the sum is rounded to the weights' few bits: the rollout's policy is then not
  exactly the one that trains.

What is not a plain low-rank product (several adapters, DoRA, quantised bases) keeps peft's own
forward in either mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from peft import PeftMixedModel, PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch._dynamo import OptimizedModule

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.temporarily import temporarily
from rlhf_app.models.lora_layers import PlainAdapter, adapter_layers, plain_adapter

RolloutMode = Literal["unfused", "fused"]

# Tuners with a forward of their own that leaves the logits alone: it adds to the loss.
_ONLY_LOSS = frozenset({PeftType.ADALORA})


def without_wrapper(model: Any) -> Any:
    """The transformers model inside the wrappers of peft and torch.compile, adapters included;
    other models as they are.

    Raises:
        ConfigError: what peft's wrapper adds is not inside the layers (prompt tuning, aLoRA).
    """
    if isinstance(model, OptimizedModule):
        return without_wrapper(model._orig_mod)
    if isinstance(model, PeftMixedModel):
        raise ConfigError(
            "a PeftMixedModel: rollouts do not know its forward; use PeftModel (get_peft_model)"
        )
    if not isinstance(model, PeftModel):
        return model
    for config in model.peft_config.values():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if config.is_prompt_learning:
            raise ConfigError(
                f"{kind} adapters put tokens before the prompt, which rollouts do not do; use "
                "adapters inside the layers, such as LoRA"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise ConfigError(
                "aLoRA adapters (alora_invocation_tokens) start at a place in the prompt, which "
                "only peft's wrapper looks for and rollouts do not; use LoRA without it"
            )
        # Whatever the tuner itself does around the model's forward is lost without it.
        forward = getattr(type(model.base_model), "forward", None)
        own = isinstance(model.base_model, BaseTuner) and forward is not BaseTuner.forward
        if own and config.peft_type not in _ONLY_LOSS:
            raise ConfigError(
                f"{kind} adapters need the forward of peft's wrapper, which rollouts do not run; "
                "use adapters inside the layers, such as LoRA"
            )
    return without_wrapper(model.get_base_model())


def base_layer(module: Any) -> Any:
    """The layer inside peft's wrappers around it; other layers as they are.

    Args:
        module: any layer, such as an embedding.
    """
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        adapter = isinstance(module, BaseTunerLayer)
        module = module.get_base_layer() if adapter else module.original_module
    return module


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Compute as the base alone does: the reference, or the reward model's trunk.

    Works around any forward, a DeepSpeed engine's of any ZeRO stage as well. Nests, and is
    undone on exceptions. Gradients and the optimizer do not see it.

    Args:
        model: a model with adapters, peft's wrapper around one, or an engine around either.

    Raises:
        ConfigError: the model has no adapters, or they are merged into the base.
    """
    module = getattr(model, "module", model)
    layers = [layer for _, layer in adapter_layers(module)]
    if not layers:
        raise ConfigError("adapter_off: this model has no adapters; attach LoRA to it first")
    if any(getattr(layer, "merged", False) for layer in layers):
        raise ConfigError("adapter_off: adapters are merged into the base; unmerge them first")
    # Not peft's `disable_adapters`: it also switches requires_grad, which a DeepSpeed engine
    # has read when it started.
    with temporarily(layers, "_disable_adapters", True):
        yield


@contextmanager
def rollout_forward(model: nn.Module, mode: RolloutMode = "unfused") -> Iterator[None]:
    """Run plain adapters the fast way; everything is restored on exit and on exceptions.

    To be entered in eval mode, with whole weights, without gradients. A model without
    adapters, or with all of them off, is left as it is.

    Args:
        model: the model.
        mode: see the module.

    Raises:
        ConfigError: fused, and a weight is not whole here.
    """
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    with _Installed() as installed:
        for name, layer in adapter_layers(model):
            adapter = plain_adapter(layer)
            # A forward of its own on the instance is somebody else's wrapper: not ours to skip.
            if adapter is None or "forward" in layer.__dict__:
                continue
            # A head tied to the embedding must not take the embedding along.
            shared = uses[id(adapter.base.weight)] > 1
            if mode == "fused" and adapter.can_fuse and not shared:
                installed.fuse(layer, adapter, name)
            elif _needs_no_casts(adapter):
                installed.forward(layer, _Unfused(adapter))
        yield


def rollout_state(model: nn.Module) -> Hashable:
    """What the adapters would make a captured forward compute, weights aside.

    Args:
        model: the model, inside the session in which it would be captured.

    Returns:
        Equal for two moments only if the same kernels run on the same tensors with the same
        scalings: which adapters are active, off or merged, and how each layer runs.
    """
    return tuple(_layer_state(name, layer) for name, layer in adapter_layers(model))


def _layer_state(name: str, layer: Any) -> Hashable:
    forward = layer.__dict__.get("forward")
    kind = forward.kind if isinstance(forward, _Unfused | _Fused) else "peft"
    scaling = getattr(layer, "scaling", {})
    return (
        name,
        kind,
        layer._disable_adapters,
        tuple(getattr(layer, "merged_adapters", ())),
        tuple((active, scaling.get(active)) for active in layer.active_adapters),
    )


def _needs_no_casts(adapter: PlainAdapter) -> bool:
    """Whether everything has one dtype; fp32 adapters over a bf16 base do not, nor autocast."""
    weight = adapter.base.weight
    one_dtype = adapter.a_rI.dtype == adapter.b_Or.dtype == weight.dtype
    return one_dtype and not torch.is_autocast_enabled(weight.device.type)


class _Unfused:
    """x -> base(x) + scaling * B (A x)."""

    kind = "unfused"

    def __init__(self, adapter: PlainAdapter) -> None:
        self._base = adapter.base
        self._a_rI = adapter.a_rI
        self._b_Or = adapter.b_Or
        self._scaling = adapter.scaling

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            # In a graph the small product runs beside the base's large one.
            main, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                low_Nr = rows.mm(self._a_rI.t())
            out = self._base(x).contiguous()
            main.wait_stream(side)
        else:
            low_Nr = rows.mm(self._a_rI.t())
            out = self._base(x).contiguous()
        # A fresh tensor, so it can be added to in place.
        out.view(-1, out.shape[-1]).addmm_(low_Nr, self._b_Or.t(), alpha=self._scaling)
        return out


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Fused:
    """x -> base(x): the base holds the adapter's product."""

    kind = "fused"

    def __init__(self, base: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._base = base

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._base(x)


class _Installed:
    """What one session changed, undone in reverse."""

    def __init__(self) -> None:
        self._layers: list[Any] = []
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> _Installed:
        return self

    def __exit__(self, *_: object) -> None:
        for weight, backup in reversed(self._weights):
            weight.copy_(backup, non_blocking=True)
        for layer in self._layers:
            del layer.__dict__["forward"]

    def forward(self, layer: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        layer.__dict__["forward"] = forward
        self._layers.append(layer)

    def fuse(self, layer: Any, adapter: PlainAdapter, name: str) -> None:
        weight = adapter.base.weight.detach()
        if weight.numel() != layer.in_features * layer.out_features:
            raise ConfigError(
                f"lora.rollout = fused: {name} is not whole during the rollout; set "
                "hybrid_engine.pin_parameters to true, or lora.rollout to unfused"
            )
        # Every backup is taken before its weight changes, so that leaving half-way restores
        # what was changed. Pinned memory comes from torch's cache from the second time on.
        backup = torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda)
        backup.copy_(weight, non_blocking=True)
        self._weights.append((weight, backup))
        weight.copy_(adapter.fused_weight())
        self.forward(layer, _Fused(adapter.base))
