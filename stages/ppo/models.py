"""The four models of PPO: actor, critic, reference and reward."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from rlhf_app.config.schema import PPOConfig, RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import HybridEngine
from rlhf_app.models.chat_format import ChatFormat, Kind
from rlhf_app.models.load import eos_token_ids, load_causal_lm, model_max_length, resolve_dtype
from rlhf_app.models.lora import attach
from rlhf_app.models.scalar_head import (
    ScalarHeadModel,
    ScoreStats,
    load_scalar_model,
    new_scalar_model,
    read_reward_facts,
)
from rlhf_app.models.tokenizer import load_tokenizer, tokenizer_hash
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import Dist
from stages.ppo.reward import RewardScorer
from stages.ppo.shared_base import CriticOverReward, ReferenceView, RewardView

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PPOModels:
    """Everything with weights in stage 3.

    Attributes:
        actor: trained, and sampled from the same weights.
        critic: trained engine around a `ScalarHeadModel`.
        reference: the actor's starting point, frozen; with LoRA the actor's own base.
        scorer: around the frozen reward model; with LoRA that may be the critic's own base.
        tokenizer, chat_format, tokenizer_id: the actor's.
        suppress_ids: tokens that rollouts never sample, in no policy's support.
    """

    actor: HybridEngine
    critic: Any
    reference: Any
    scorer: RewardScorer
    tokenizer: Any
    chat_format: ChatFormat
    tokenizer_id: str
    suppress_ids: tuple[int, ...]


def fold_normalisation(model: ScalarHeadModel, stats: ScoreStats) -> None:
    """Rewrite the head in place so that it outputs (raw - mean) / std.

    The critic then starts as the reward model's normalised score, affine included: it predicts
    rewards on the scale on which they arrive.
    """
    std = max(stats.std, stats.std_floor)
    with torch.no_grad():
        model.head.bias.copy_((model.head.bias.float() - stats.mean) / std)
        model.head.weight.copy_(model.head.weight.float() / std)


def _embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)


def load_models(
    config: RunConfig, inputs: dict[str, str], dist: Dist, total_optimizer_steps: int
) -> PPOModels:
    """Load the four models and wrap the trained two in engines.

    With LoRA one engine serves two models over one base: the actor's is the reference while
    its adapters are off, the critic's is the reward model, where that reads the actor's ids.

    Args:
        config: the run.
        inputs: paths of `actor` and `reward`.
        dist: process group and device.
        total_optimizer_steps: length of the learning-rate schedules.

    Raises:
        ConfigError: a path is no usable model, or the lengths exceed the model's positions.
    """
    ppo = config.ppo
    dtype = resolve_dtype(config.model.dtype, dist.device)
    trust = config.model.trust_remote_code
    loading: dict[str, Any] = {
        "dtype": dtype,
        "device": dist.device,
        "attn_implementation": config.model.attn_implementation,
        "trust_remote_code": trust,
    }
    make_engine = partial(
        engine_for,
        dtype=dtype,
        micro_batch_size=ppo.micro_batch_size,
        total_steps=total_optimizer_steps,
        dist=dist,
    )

    # The actor and its tokenizer.
    tokenizer = load_tokenizer(inputs["actor"], trust_remote_code=trust)
    actor_model = load_causal_lm(
        inputs["actor"], gradient_checkpointing=ppo.actor.gradient_checkpointing, **loading
    )
    _check_lengths(ppo, actor_model, inputs["actor"])
    stop_ids = eos_token_ids(actor_model)
    chat_format = ChatFormat(tokenizer, config.data.chat_format, extra_stop_ids=stop_ids)

    # The reward model, and how it reads the actor's answers.
    facts = read_reward_facts(inputs["reward"])
    reward_model = load_scalar_model(
        inputs["reward"], gradient_checkpointing=ppo.critic.gradient_checkpointing, **loading
    )
    reward_tokenizer = load_tokenizer(inputs["reward"], trust_remote_code=trust)
    # It reads the actor's ids as they are where it knows all of them.
    same_ids = tokenizer_hash(reward_tokenizer) == tokenizer_hash(tokenizer) and (
        _embeddings(reward_model.backbone) >= _embeddings(actor_model)
    )
    reward_format = ChatFormat(
        reward_tokenizer,
        cast("Kind", facts.chat_format) or config.data.chat_format,
        extra_stop_ids=facts.eos_token_ids,
    )
    same_format = reward_format.kind == chat_format.kind and (
        chat_format.kind != "template" or reward_tokenizer.chat_template == tokenizer.chat_template
    )
    if not (same_ids and same_format):
        log.warning(
            "the reward model was trained with another %s than the actor's: answers are "
            "re-templated and re-encoded for it",
            "chat format" if same_ids else "tokenizer",
        )

    # The critic's beginning.
    if not same_ids:
        # The reward model cannot read the actor's ids: the critic starts from the actor's own
        # backbone, with a head of zeros so that its first values are neutral.
        critic_model = new_scalar_model(
            inputs["actor"],
            seed=config.seed,
            gradient_checkpointing=ppo.critic.gradient_checkpointing,
            **loading,
        )
        torch.nn.init.zeros_(critic_model.head.weight)
    elif ppo.critic.lora.enabled:
        critic_model = CriticOverReward(
            reward_model.backbone, copy.deepcopy(reward_model.head), reward_model.head
        )
        fold_normalisation(critic_model, facts.stats)
    else:
        critic_model = load_scalar_model(
            inputs["reward"], gradient_checkpointing=ppo.critic.gradient_checkpointing, **loading
        )
        fold_normalisation(critic_model, facts.stats)

    # Adapters, engines, and the two frozen models beside or inside them.
    for model, settings, name, role in (
        (actor_model, ppo.actor, "ppo.actor.lora", "actor"),
        (critic_model.backbone, ppo.critic, "ppo.critic.lora", "reward" if same_ids else "actor"),
    ):
        if settings.lora.enabled:
            attach(model, settings.lora, seed=config.seed, base=inputs[role], setting=name)
    actor = make_engine(actor_model, ppo.actor, hybrid=config.hybrid_engine)
    actor.generator.lora_rollout = ppo.actor.lora.rollout
    critic = make_engine(critic_model, ppo.critic)
    reference = (
        ReferenceView(actor)
        if ppo.actor.lora.enabled
        else load_causal_lm(inputs["actor"], **loading).eval().requires_grad_(False)
    )
    shares_trunk = isinstance(critic_model, CriticOverReward)
    return PPOModels(
        actor=actor,
        critic=critic,
        reference=reference,
        scorer=RewardScorer(
            model=RewardView(critic) if shares_trunk else reward_model.eval().requires_grad_(False),
            stats=facts.stats,
            settings=ppo,
            actor_format=chat_format,
            own_format=None if same_ids and same_format else reward_format,
        ),
        tokenizer=tokenizer,
        chat_format=chat_format,
        tokenizer_id=tokenizer_hash(tokenizer),
        suppress_ids=() if ppo.stop_at_eos else tuple(chat_format.stop_ids),
    )


def _check_lengths(ppo: PPOConfig, model: Any, path: str) -> None:
    positions = model_max_length(model.config)
    wanted = ppo.max_prompt_length + ppo.max_response_length
    if wanted > positions:
        raise ConfigError(
            f"ppo.max_prompt_length + ppo.max_response_length = {wanted} exceeds the {positions} "
            f"positions of {path}: lower one of them"
        )
