"""Seeds of the global generators."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

# Far apart, so that rank r of one seed is not rank 0 of a neighbouring seed.
RANK_STRIDE = 100_003


def make_deterministic() -> None:
    """Has torch take kernels on CUDA whose sums always run in the same order.

    Call it before the first work for a GPU: cuBLAS reads its variable once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seeds Python's, NumPy's and torch's generators, differently on each rank.

    Data order and initialisation must agree between ranks and therefore do not use the
    global generators: they take the seed itself.

    Args:
        seed: the run's seed.
        rank: this process's rank.
    """
    value = seed + rank * RANK_STRIDE
    random.seed(value)
    np.random.seed(value % 2**32)  # a user's own reward function may draw from it
    torch.manual_seed(value)
