"""Files of tensors are read as data: nothing in them can run code.

`torch.load` unpickles, and a pickle may call any function. Under weights-only it may build
tensors, plain values and allow-listed types alone. DeepSpeed asks for the unsafe way on every
load of its own (`weights_only=False`), so it is forced for the whole process.

What the checkpoints of DeepSpeed 0.19.8 need beyond that, all in its optimizer files (ZeRO 1-3;
without ZeRO, and in the model's files, there is nothing):

    LossScaler          fp32 and bf16
    DynamicLossScaler   fp16
    ZeroStageEnum       ZeRO 1, 2 and 3
    fragment_address    ZeRO 1 and 2
"""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_app.errors import ConfigError

log = logging.getLogger(__name__)

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_UNFORCE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_TRUE = ("1", "y", "yes", "true")  # as torch reads them

_UNSAFE = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module \S+ is blocked)")


def force_safe_loading() -> None:
    """Makes every `torch.load` of this process weights-only, whatever its caller says.

    Processes that it starts inherit that. Calling it again does nothing.
    """
    if os.environ.pop(_UNFORCE, "").lower() in _TRUE:
        log.warning(
            "%s is ignored: files of weights are read as data only, without their code", _UNFORCE
        )
    os.environ[FORCE] = "1"


def deepspeed_types() -> list[Any]:
    """The types above; DeepSpeed must have been imported."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def allow_deepspeed_types() -> None:
    """Lets `torch.load` build `deepspeed_types`, and no other."""
    import torch

    torch.serialization.add_safe_globals(deepspeed_types())


@contextmanager
def refused_files(what: str) -> Iterator[None]:
    """Turns torch's refusal of a file, several lines of advice to trust it, into one line.

    Args:
        what: the setting and the path, or the checkpoint.

    Raises:
        ConfigError: a file that holds more than weights and plain values, or is damaged.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{what}: {_why(str(error))}") from None
    except RuntimeError as error:
        if "TorchScript archive" not in str(error):
            raise
        raise ConfigError(f"{what}: holds a TorchScript program; {_FIX}") from None


_FIX = "nothing of it was run; take a copy in safetensors from a place that you trust"


def _why(message: str) -> str:
    found = _UNSAFE.search(message)
    if found is None:
        return f"a file of weights is damaged, or holds more than weights; {_FIX}"
    return f"a file of weights asks for {found[1]}, which is no part of weights; {_FIX}"
