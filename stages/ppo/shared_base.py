"""Two models over one frozen base, told apart by the adapters: on in the one that trains."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_app.hybrid_engine.lora import adapter_off
from rlhf_app.models.scalar_head import ScalarHead, ScalarHeadModel


class CriticOverReward(ScalarHeadModel):
    """A critic with adapters that still holds the reward model that it started from.

    Args:
        backbone: the reward model's trunk, with adapters.
        head: the critic's, trained.
        reward_head: the reward model's, frozen.
    """

    def __init__(self, backbone: Any, head: ScalarHead, reward_head: ScalarHead) -> None:
        super().__init__(backbone, head)
        self.reward_head = reward_head.requires_grad_(False)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        *,
        reward: bool = False,
    ) -> torch.Tensor:
        """Values, or with `reward` the frozen head's scores, of every prefix of every row.

        Args:
            input_ids: int64 (B, T), left-aligned.
            position_ids: int64 (B, T) or (1, T), or None for 0..T-1.
            reward: with adapters off, this is the reward model.

        Returns:
            fp32 (B, T).
        """
        head = self.reward_head if reward else self.head
        return self.apply_head(head, input_ids, position_ids)


class RewardView:
    """The reward model inside a critic's engine, called as a `ScalarHeadModel` is.

    Args:
        engine: around a `CriticOverReward`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def config(self) -> Any:
        """The trunk's config."""
        return self._engine.module.config

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Raw scores, fp32 (B, T); see `ScalarHeadModel.forward`."""
        with adapter_off(self._engine):
            scores_BT: torch.Tensor = self._engine(input_ids, position_ids, reward=True)
        return scores_BT


class ReferenceView:
    """The reference policy inside the actor's engine: its base, without the adapters.

    Args:
        engine: around a causal LM with adapters.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def module(self) -> Any:
        """The model, whose forward runs with its adapters unless it is called through the view."""
        return self._engine.module

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model's forward returns."""
        with adapter_off(self._engine):
            return self._engine(*inputs, **kwargs)
