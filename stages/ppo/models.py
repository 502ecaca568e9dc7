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


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Weights and formats in memory, before adapters and engines.

    Attributes:
        actor: causal LM ready to train.
        reference: frozen copy of it; None with LoRA on the actor, whose own base serves.
        reward: the reward model.
        critic: ready to train; with LoRA a `CriticOverReward` may hold the reward model as well.
        stats: normalisation of the reward model's scores.
        chat_format: the actor's.
        reward_format: the reward model's; None where it reads the actor's ids as they are.
        tokenizer, tokenizer_id: the actor's.
        actor_base, critic_base: where the weights came from, in words; adapters store it.
    """

    actor: Any
    reference: Any | None
    reward: ScalarHeadModel
    critic: ScalarHeadModel
    stats: ScoreStats
    chat_format: ChatFormat
    reward_format: ChatFormat | None = None
    tokenizer: Any = None
    tokenizer_id: str = ""
    actor_base: str = ""
    critic_base: str = ""


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
    return assemble(load_parts(config, inputs, dist), config, dist, total_optimizer_steps)


def assemble(parts: Parts, config: RunConfig, dist: Dist, total_optimizer_steps: int) -> PPOModels:
    """Put adapters on models in memory and wrap the trained two in engines.

    Args:
        parts: the models; actor and critic are changed in place.
        config: the run.
        dist: process group and device.
        total_optimizer_steps: length of the learning-rate schedules.
    """
    ppo = config.ppo
    for model, settings, setting, base in (
        (parts.actor, ppo.actor, "ppo.actor.lora", parts.actor_base),
        (parts.critic.backbone, ppo.critic, "ppo.critic.lora", parts.critic_base),
    ):
        if settings.lora.enabled:
            attach(model, settings.lora, seed=config.seed, base=base, setting=setting)
    make_engine = partial(
        engine_for,
        dtype=resolve_dtype(config.model.dtype, dist.device),
        micro_batch_size=ppo.micro_batch_size,
        total_steps=total_optimizer_steps,
        dist=dist,
    )
    actor = make_engine(parts.actor, ppo.actor, hybrid=config.hybrid_engine)
    actor.generator.lora_rollout = ppo.actor.lora.rollout
    critic = make_engine(parts.critic, ppo.critic)
    reward: ScalarHeadModel | RewardView = parts.reward
    if isinstance(parts.critic, CriticOverReward):
        reward = RewardView(critic)
    else:
        parts.reward.eval().requires_grad_(False)
    return PPOModels(
        actor=actor,
        critic=critic,
        reference=ReferenceView(actor) if parts.reference is None else parts.reference,
        scorer=RewardScorer(
            model=reward,
            stats=parts.stats,
            settings=ppo,
            actor_format=parts.chat_format,
            own_format=parts.reward_format,
        ),
        tokenizer=parts.tokenizer,
        chat_format=parts.chat_format,
        tokenizer_id=parts.tokenizer_id,
        suppress_ids=() if ppo.stop_at_eos else tuple(parts.chat_format.stop_ids),
    )


def load_parts(config: RunConfig, inputs: dict[str, str], dist: Dist) -> Parts:
    """Load the models of `load_models`; it says what of them is shared, and what raises."""
    ppo = config.ppo
    trust = config.model.trust_remote_code
    loading: dict[str, Any] = {
        "dtype": resolve_dtype(config.model.dtype, dist.device),
        "device": dist.device,
        "attn_implementation": config.model.attn_implementation,
        "trust_remote_code": trust,
    }

    # The actor and its tokenizer.
    tokenizer = load_tokenizer(inputs["actor"], trust_remote_code=trust)
    actor = load_causal_lm(
        inputs["actor"], gradient_checkpointing=ppo.actor.gradient_checkpointing, **loading
    )
    _check_lengths(ppo, actor, inputs["actor"])
    chat_format = ChatFormat(
        tokenizer, config.data.chat_format, extra_stop_ids=eos_token_ids(actor)
    )

    # The reward model, and how it reads the actor's answers.
    facts = read_reward_facts(inputs["reward"])
    for_critic = loading | {"gradient_checkpointing": ppo.critic.gradient_checkpointing}
    reward = load_scalar_model(inputs["reward"], **for_critic)
    reward_tokenizer = load_tokenizer(inputs["reward"], trust_remote_code=trust)
    # It reads the actor's ids as they are where it knows all of them.
    same_ids = tokenizer_hash(reward_tokenizer) == tokenizer_hash(tokenizer) and (
        _embeddings(reward.backbone) >= _embeddings(actor)
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
        critic = new_scalar_model(inputs["actor"], seed=config.seed, **for_critic)
        torch.nn.init.zeros_(critic.head.weight)
    else:
        if ppo.critic.lora.enabled:
            critic = over_reward(reward)
        else:
            critic = load_scalar_model(inputs["reward"], **for_critic)
        fold_normalisation(critic, facts.stats)

    # The reference: with LoRA the actor's own base.
    reference = None
    if not ppo.actor.lora.enabled:
        reference = load_causal_lm(inputs["actor"], **loading).eval().requires_grad_(False)
    return Parts(
        actor=actor,
        reference=reference,
        reward=reward,
        critic=critic,
        stats=facts.stats,
        chat_format=chat_format,
        reward_format=None if same_ids and same_format else reward_format,
        tokenizer=tokenizer,
        tokenizer_id=tokenizer_hash(tokenizer),
        actor_base=inputs["actor"],
        critic_base=inputs["reward" if same_ids else "actor"],
    )


def over_reward(reward: ScalarHeadModel) -> CriticOverReward:
    """A critic that starts as the reward model, over the same backbone, with its own head."""
    return CriticOverReward(reward.backbone, copy.deepcopy(reward.head), reward.head)


def _embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)


def _check_lengths(ppo: PPOConfig, model: Any, path: str) -> None:
    positions = model_max_length(model.config)
    wanted = ppo.max_prompt_length + ppo.max_response_length
    if wanted > positions:
        raise ConfigError(
            f"ppo.max_prompt_length + ppo.max_response_length = {wanted} exceeds the {positions} "
            f"positions of {path}: lower one of them"
        )
