"""The one place that imports DeepSpeed: quiet, quick, and safe from environment traps."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch

from rlhf_app.training.safe_load import allow_deepspeed_types, force_safe_loading

# A C++ collective for CPU tensors that DeepSpeed compiles when it first joins a process
# group: over a minute of start-up for messages that gloo carries well enough.
_SHARED_MEMORY_OP = "deepspeed_shm_comm"


@cache
def load_deepspeed() -> ModuleType:
    """Imports DeepSpeed with a usable environment.

    Two variables are set before the import, because DeepSpeed reads them while importing:
    `TORCH_CUDA_ARCH_LIST` loses letter suffixes (its op builder turns `9.0a` into a number and
    dies), and `DS_ACCELERATOR` is set to cpu where there is no CUDA (otherwise it searches
    for accelerators and warns on every start). Its checkpoints, and all that `torch.load` reads
    from then on, cannot run code (`safe_load`).

    Returns:
        The `deepspeed` module.
    """
    force_safe_loading()
    arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if arch_list:
        os.environ["TORCH_CUDA_ARCH_LIST"] = plain_arch_list(arch_list)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    allow_deepspeed_types()
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False
    # ZeRO-3 calls collectives that torch is renaming, once per parameter.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    return deepspeed


@cache
def compiled_adamw() -> Callable[..., torch.optim.Optimizer] | str:
    """DeepSpeed's AdamW for CUDA, built if it is not yet; or why it cannot be, in short.

    The first call on a machine compiles for about a minute, into torch's cache of extensions.
    """
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None or not os.access(os.path.join(CUDA_HOME, "bin", "nvcc"), os.X_OK):
        return "there is no CUDA compiler (nvcc)"
    load_deepspeed()
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.op_builder import FusedAdamBuilder

    try:
        FusedAdamBuilder().load(verbose=False)
    except Exception as error:  # compilers fail in many ways, and training needs none of them
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return f"DeepSpeed's AdamW does not build ({reason[0][:200]})"
    kernel: Callable[..., torch.optim.Optimizer] = FusedAdam
    return kernel


def plain_arch_list(arch_list: str) -> str:
    """Removes the letter after a CUDA architecture: `9.0a;8.6+PTX` -> `9.0;8.6+PTX`."""
    return re.sub(r"(\d+\.\d+)[a-z]", r"\1", arch_list)
