"""Models with random weights, made on the device in their own dtype: no file, no other copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlhf_app.models.dropout import disable_dropout_in_config
from rlhf_app.models.load import prepare_for_training
from rlhf_app.models.scalar_head import ScalarHead, ScalarHeadModel, hidden_width

# Of OPT's and Llama's own initialisation: activations stay finite in any depth.
_STD = 0.02


def random_causal_lm(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A causal LM ready to train, as `load_causal_lm` returns it.

    Args:
        config: a transformers config.
        dtype: of the parameters.
        device: where they are made.
    """
    from transformers import AutoModelForCausalLM

    return _built(AutoModelForCausalLM, config, dtype, device, False)


def random_scalar_model(
    config: Any, dtype: torch.dtype, device: torch.device, *, gradient_checkpointing: bool = False
) -> ScalarHeadModel:
    """A reward model or critic ready to train, as `load_scalar_model` returns it.

    Args:
        config: a transformers config.
        dtype: of the parameters.
        device: where they are made.
        gradient_checkpointing: recompute activations in the backward.
    """
    from transformers import AutoModel

    backbone = _built(AutoModel, config, dtype, device, gradient_checkpointing)
    width = hidden_width(backbone.config)
    head = ScalarHead(width).to(device, dtype)
    with torch.no_grad():
        head.weight.normal_(0.0, (width + 1) ** -0.5)
        head.bias.zero_()
    return ScalarHeadModel(backbone, head).train()


def _built(
    auto_class: Any,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    gradient_checkpointing: bool,
) -> Any:
    disable_dropout_in_config(config)
    with device, _uninitialised():
        model = auto_class.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    _fill(model)
    return prepare_for_training(model, device, gradient_checkpointing)


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Modules keep the memory that they get: a fill of every weight follows anyway."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield


def _fill(model: nn.Module) -> None:
    """Norms are the identity, biases 0, matrices normal."""
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim >= 2:
                    parameter.normal_(0.0, _STD)
                elif name == "weight":
                    parameter.fill_(1.0)
                else:
                    parameter.zero_()
