"""Which prompts an update answers, and on which rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from data_sources.examples import PromptExample
from rlhf_app.config.schema import PPOConfig
from rlhf_app.errors import ConfigError
from rlhf_app.training.distributed import Dist


class PromptStream:
    """Epoch after epoch of shuffled prompts, addressed by position.

    Args:
        prompts: the training prompts, not empty.
        seed: of the shuffles.
        in_order: from the first to the last, without a shuffle.
    """

    def __init__(
        self, prompts: Sequence[PromptExample], seed: int, *, in_order: bool = False
    ) -> None:
        self._prompts = prompts
        self._in_order = in_order
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __getitem__(self, position: int) -> PromptExample:
        epoch, offset = divmod(position, len(self._prompts))
        if self._in_order:
            return self._prompts[offset]
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(len(self._prompts), generator=generator)
            self._epoch = epoch
        return self._prompts[int(self._order[offset])]


def rank_uids(ppo: PPOConfig, dist: Dist) -> list[int]:
    """This rank's rows of a rollout batch, mini-batch after mini-batch.

    Mini-batch m is rows m*S to (m+1)*S - 1 of the whole batch (S rows each) for any number of
    ranks; every rank takes an equal slice of each.

    Args:
        ppo: settings; the sizes divide, as checked at the start of a run.
        dist: this process's place.

    Returns:
        Places in the rollout batch. Its answers `n * p` to `n * p + n - 1` are those to prompt p,
        with n = `answers_per_prompt`; they may lie in unlike mini-batches and on unlike ranks.

    Raises:
        ConfigError: on every rank, where a worker was started with another number of processes
            than the run was checked for: some would have more forwards than others, and wait.
    """
    unit, factors = ppo.mini_batches * dist.world_size, "ppo.mini_batches"
    if ppo.micro_batch_tokens is None:
        unit, factors = unit * ppo.micro_batch_size, f"{factors} x ppo.micro_batch_size"
    if ppo.rollout_batch_size % unit:
        raise ConfigError(
            f"ppo.rollout_batch_size = {ppo.rollout_batch_size}: is not divisible by {unit} "
            f"({factors} x {dist.world_size} processes); "
            "start another number of processes, or change one of them"
        )
    size = ppo.rollout_batch_size // ppo.mini_batches
    share = size // dist.world_size
    return [
        mini_batch * size + dist.rank * share + row
        for mini_batch in range(ppo.mini_batches)
        for row in range(share)
    ]


def update_prompts(
    stream: PromptStream, update: int, uids: Sequence[int], ppo: PPOConfig
) -> list[PromptExample]:
    """The prompts of some answers of an update; every prompt is used equally often.

    Args:
        stream: of prompts.
        update: its number, from 1.
        uids: places in its rollout batch.
        ppo: settings.
    """
    first = (update - 1) * (ppo.rollout_batch_size // ppo.answers_per_prompt)
    return [stream[first + uid // ppo.answers_per_prompt] for uid in uids]


def one_pass(prompts: int, ppo: PPOConfig) -> int:
    """Updates after which each of so many prompts was used at least once."""
    return math.ceil(prompts * ppo.answers_per_prompt / ppo.rollout_batch_size)
