"""Dropout off, everywhere.

In PPO the old, new and reference log-probs must come from the same function of the weights;
dropout would make the ratio of a first update differ from 1 and the KL differ from 0. SFT and
the reward model train without it too, so that one run has one setting.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def disable_dropout_in_config(config: Any) -> None:
    """Sets every dropout rate of a Hugging Face config to 0, before the model is built.

    Some models (OPT) read rates from the config into plain numbers, which no later change
    of modules would reach.

    Args:
        config: changed in place, nested configs as well.
    """
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and value is not config:
            disable_dropout_in_config(value)


def disable_dropout_in_modules(model: nn.Module) -> None:
    """Sets the rate of every dropout module to 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
