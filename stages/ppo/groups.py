"""One number of every answer of all ranks: those to one prompt may lie on any of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_app.training.distributed import Dist


def gather_groups(
    values: Sequence[float], uids: Sequence[int], dist: Dist, *, answers: int, per_prompt: int
) -> torch.Tensor:
    """Put the numbers of all ranks' answers in the order of their uids.

    Args:
        values: one of each answer of this rank.
        uids: the answers' places in the rollout batch; each is on exactly one rank.
        dist: process group; every rank calls.
        answers: of the rollout batch, all ranks.
        per_prompt: answers of one prompt: those with equal uid // per_prompt.

    Returns:
        fp64 [prompts, answers of each] on the host, the same to the last bit on every rank and
        for any number of them: each entry is one number and zeros.
    """
    own = torch.zeros(answers, dtype=torch.float64)
    own[list(uids)] = torch.tensor(values, dtype=torch.float64)
    return torch.tensor(dist.sum(own.tolist()), dtype=torch.float64).view(-1, per_prompt)
