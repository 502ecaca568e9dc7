"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on a model, and off it again for saving.

peft puts the adapters inside the model's own layers, so that the model stays the transformers
model that it was. The base is frozen. Adapters have the base's dtype: under bf16 the optimizer
keeps fp32 masters of them as of every trained weight, which is what small steps need, while
fp32 copies in the forward would only add casts to each layer of training and rollout.

An artifact holds the merged weights, so that plain transformers loads it and the next stage
starts from exactly the policy that was trained; the adapter alone lies beside them in
`adapter/`, in peft's own format.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlhf_app.config.schema import LoraSettings
from rlhf_app.errors import ConfigError
from rlhf_app.models.lora_layers import adapter_layers, fuse, is_conv1d

log = logging.getLogger(__name__)

#: Where an artifact keeps the adapter alone.
ADAPTER = "adapter"
_NAME = "default"


def attach(model: Any, lora: LoraSettings, *, seed: int, base: str, setting: str) -> None:
    """Freeze a model and put trainable adapters into its layers, in place.

    The adapters' product is 0 at first: the model computes what it did, to the last bit.

    Args:
        model: a transformers model, with or without a language-model head.
        lora: rank, scale and layers; rank > 0.
        seed: of the adapters; the same on every rank.
        base: where the model came from; stored with the adapter.
        setting: dotted name of `lora`, for error messages.

    Raises:
        ConfigError: a name matches no layer that can be adapted, a layer shares its weight
            with another one, or the model has adapters already.
    """
    if any(True for _ in adapter_layers(model)):
        raise ConfigError(
            f"{setting}: {base} comes with adapters of its own: merge them into its weights "
            "first (peft's merge_and_unload)"
        )
    layers = _linear_layers(model)
    targets = _targets(model, lora, layers, setting)
    _check_not_tied(model, targets, setting)
    config = LoraConfig(
        r=lora.rank,
        # Some readers of adapter files take whole numbers only.
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=sorted(targets),
        fan_in_fan_out=any(is_conv1d(layers[name]) for name in targets),
        # A directory by its full path: the adapter is read from anywhere.
        base_model_name_or_path=os.path.abspath(base) if os.path.isdir(base) else base,
    )
    # peft draws A from the global generator, which differs between ranks.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, _NAME)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    log.info(
        "%s: %d layers have adapters of rank %d, %d trained parameters at learning rate %g",
        *(setting, len(targets), lora.rank, trained, lora.learning_rate),
    )


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer that can have an adapter, by full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


def _targets(
    model: Any, lora: LoraSettings, layers: dict[str, nn.Module], setting: str
) -> set[str]:
    """Full names of the layers to adapt; each name given must match one."""
    head = model.get_output_embeddings()
    body = {name for name, module in layers.items() if module is not head}
    if not body:
        raise ConfigError(f"{setting}: this model has no linear layers to adapt")
    if lora.target_modules == "all-linear":
        return body
    found: set[str] = set()
    for wanted in lora.target_modules:
        matches = {name for name in layers if f".{name}".endswith(f".{wanted}")}
        if not matches:
            known = sorted({name.rpartition(".")[2] for name in body})
            raise ConfigError(
                f"{setting}.target_modules: no linear layer of this model is called {wanted!r}; "
                f"its layers are {', '.join(known)} (or all-linear)"
            )
        found |= matches
    return found


def _check_not_tied(model: nn.Module, targets: set[str], setting: str) -> None:
    """A merged weight must belong to one module alone."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        shared = targets & set(names)
        if shared and len(names) > 1:
            raise ConfigError(
                f"{setting}.target_modules: {' and '.join(names)} share one weight: leave "
                f"{min(shared)} out"
            )


def has_adapters(model: nn.Module) -> bool:
    """Whether `attach` was applied to the model or a part of it."""
    return any(True for _ in adapter_layers(model))


def merge_state(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merge adapters into a copy of the weights; the model keeps its own.

    Args:
        model: the model, or one that holds it.
        state: copies of its state dict, on one device and whole.

    Returns:
        The state dict of the model without adapters: each adapted weight is
        W + scaling * B A, computed in fp32 and rounded once. Without adapters: `state`.
    """
    merged = dict(state)
    for name, layer in adapter_layers(model):
        # Only what `attach` makes; a user's own peft model does not come here.
        assert type(layer) is LoraLinear
        prefix = f"{name}." if name else ""
        weight = merged.pop(f"{prefix}base_layer.weight")
        bias = merged.pop(f"{prefix}base_layer.bias", None)
        a = merged.pop(f"{prefix}lora_A.{_NAME}.weight")
        b = merged.pop(f"{prefix}lora_B.{_NAME}.weight")
        sum_of_both = fuse(weight, a, b, layer.scaling[_NAME], is_conv1d(layer.get_base_layer()))
        merged[f"{prefix}weight"] = sum_of_both.to(weight.dtype)
        if bias is not None:
            merged[f"{prefix}bias"] = bias
    return merged


def save_adapter(
    model: Any,
    state: dict[str, torch.Tensor],
    directory: Path,
    *,
    prefix: str = "",
    task_type: str = "CAUSAL_LM",
    modules_to_save: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the adapter alone, as peft's `PeftModel.from_pretrained` reads it.

    Args:
        model: the transformers model that `attach` was applied to.
        state: its state dict, whole, on the CPU.
        directory: created; gets `adapter_config.json` and `adapter_model.safetensors`.
        prefix: where that model lies inside the class that will be loaded, such as `model.`.
        task_type: peft's name of that class.
        modules_to_save: other trained weights of that class, such as `score.weight`.
    """
    from safetensors.torch import save_file

    config: LoraConfig = model.peft_config[_NAME]
    written = LoraConfig(**{**config.to_dict(), "task_type": task_type, "inference_mode": True})
    # Full names: peft shortens its own list, and `prefix` does not go before short ones. Sorted:
    # a set would be written in another order each time, and equal adapters would look unlike.
    written.target_modules = sorted(f"{prefix}{name}" for name, _ in adapter_layers(model))
    extra = modules_to_save or {}
    written.modules_to_save = sorted({name.rpartition(".")[0] for name in extra}) or None
    weights = {
        f"{prefix}{key}".replace(f".{_NAME}.", "."): tensor
        for key, tensor in state.items()
        if ".lora_A." in key or ".lora_B." in key
    }
    # peft's wrapper around the model puts this before every name.
    weights = {f"base_model.model.{key}": tensor for key, tensor in (weights | extra).items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    written.save_pretrained(directory)
