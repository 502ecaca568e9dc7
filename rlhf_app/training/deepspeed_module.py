"""The one place that imports DeepSpeed: quiet, quick, and safe from environment traps."""

from __future__ import annotations

import os
import re
import warnings
from functools import cache
from types import ModuleType

import torch

# A C++ collective for CPU tensors that DeepSpeed compiles when it first joins a process
# group: over a minute of start-up for messages that gloo carries well enough.
_SHARED_MEMORY_OP = "deepspeed_shm_comm"


@cache
def load_deepspeed() -> ModuleType:
    """Imports DeepSpeed with a usable environment.

    Two variables are set before the import, because DeepSpeed reads them while importing:
    `TORCH_CUDA_ARCH_LIST` loses letter suffixes (its op builder turns `9.0a` into a number and
    dies), and `DS_ACCELERATOR` is set to cpu where there is no CUDA (otherwise it searches
    for accelerators and warns on every start).

    Returns:
        The `deepspeed` module.
    """
    arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if arch_list:
        os.environ["TORCH_CUDA_ARCH_LIST"] = plain_arch_list(arch_list)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False
    # ZeRO-3 calls collectives that torch is renaming, once per parameter.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    return deepspeed


def plain_arch_list(arch_list: str) -> str:
    """Removes the letter after a CUDA architecture: `9.0a;8.6+PTX` -> `9.0;8.6+PTX`."""
    return re.sub(r"(\d+\.\d+)[a-z]", r"\1", arch_list)
