"""The four models of PPO with random weights, and answers' prompts without text."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any, cast

import torch

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.bench.random_models import random_causal_lm, random_scalar_model
from rlhf_app.bench.shapes import config_of
from rlhf_app.config.schema import RunConfig
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.load import eos_token_ids, prepare_for_training, resolve_dtype
from rlhf_app.models.scalar_head import ScoreStats
from stages.ppo.models import Parts, over_reward


@dataclass(frozen=True, slots=True)
class _IdsOnly:
    """Stands in for a chat format: a benchmark has no text."""

    stop_ids: tuple[int, ...]

    def decode(self, _ids: Any) -> str:
        """No text."""
        return ""


def random_parts(actor: str, critic: str, config: RunConfig, device: torch.device) -> Parts:
    """Models of these shapes, made on the device.

    Args:
        actor: name of its shape.
        critic: name of its shape, which the reward model has as well.
        config: settings: dtype, checkpointing, LoRA.
        device: where they are made.
    """
    torch.manual_seed(config.seed)
    ppo, dtype = config.ppo, resolve_dtype(config.model.dtype, device)
    policy = random_causal_lm(config_of(actor), dtype, device)
    reference = None
    if not ppo.actor.lora.enabled:
        reference = copy.deepcopy(policy).eval().requires_grad_(False)
    if ppo.actor.gradient_checkpointing:
        prepare_for_training(policy, device, gradient_checkpointing=True)
    trunk, checkpointing = config_of(critic), ppo.critic.gradient_checkpointing
    reward = random_scalar_model(trunk, dtype, device, gradient_checkpointing=checkpointing)
    value = None
    if ppo.has_critic:
        value = over_reward(reward) if ppo.critic.lora.enabled else copy.deepcopy(reward)
    return Parts(
        actor=policy,
        reference=reference,
        reward=reward,
        critic=value,
        stats=ScoreStats(),
        chat_format=cast("ChatFormat", _IdsOnly(eos_token_ids(policy))),
        actor_base=actor,
        critic_base=critic,
    )


def random_examples(vocabulary: int, count: int, tokens: int, seed: int) -> list[PromptExample]:
    """Distinct prompts of one length."""
    source = random.Random(seed)
    record = Record((Message("user", ""),))
    return [
        PromptExample(str(i), [source.randrange(vocabulary) for _ in range(tokens)], "", record)
        for i in range(count)
    ]
