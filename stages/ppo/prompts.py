"""An endless, seeded stream of prompts, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data_sources.examples import PromptExample


class PromptStream:
    """Epoch after epoch of shuffled prompts, addressed by position.

    Args:
        prompts: the training prompts, not empty.
        seed: of the shuffles.
    """

    def __init__(self, prompts: Sequence[PromptExample], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, position: int) -> PromptExample:
        epoch, offset = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(len(self._prompts), generator=generator).tolist()
            self._epoch = epoch
        return self._prompts[self._order[offset]]
