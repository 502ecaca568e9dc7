"""Seeds of the global generators."""

from __future__ import annotations

import random

import numpy as np
import torch

# Far apart, so that rank r of one seed is not rank 0 of a neighbouring seed.
RANK_STRIDE = 100_003


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
