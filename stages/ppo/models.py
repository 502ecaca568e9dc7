"""The four models of PPO: actor, critic, reference and reward."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rlhf_app.config.schema import CriticSettings, PolicySettings, PPOConfig, RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import HybridEngine
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.load import eos_token_ids, load_causal_lm, model_max_length, resolve_dtype
from rlhf_app.models.lora import attach
from rlhf_app.models.scalar_head import (
    ScalarHeadModel,
    ScoreStats,
    new_scalar_model,
)
from rlhf_app.models.tokenizer import load_tokenizer, tokenizer_hash
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import Dist
from rlhf_app.training.error_phase import within
from stages.ppo.reward import RewardScorer
from stages.ppo.reward_sources.build import combine, load_text_sources, model_source
from stages.ppo.reward_sources.combined import CombinedScorer
from stages.ppo.reward_sources.stage2 import load_stage2
from stages.ppo.reward_sources.texts import TextSource
from stages.ppo.shared_base import CriticOverReward, ReferenceView, RewardView


@dataclass(frozen=True)
class PPOModels:
    """Everything with weights in stage 3.

    Attributes:
        actor: trained, and sampled from the same weights.
        critic: trained engine around a `ScalarHeadModel`; None where the estimator has none.
        reference: the actor's starting point, frozen; with LoRA the actor's own base.
        scorer: around the sources of rewards, all frozen; with LoRA the stage-2 model may be the
            critic's own base.
        tokenizer, chat_format, tokenizer_id: the actor's.
        suppress_ids: tokens that rollouts never sample, in no policy's support.
    """

    actor: HybridEngine
    critic: Any
    reference: Any
    scorer: RewardScorer | CombinedScorer
    tokenizer: Any
    chat_format: ChatFormat
    tokenizer_id: str
    suppress_ids: tuple[int, ...]


def fold_normalisation(model: ScalarHeadModel, stats: ScoreStats, weight: float = 1.0) -> None:
    """Rewrite the head in place so that it outputs weight x (raw - mean) / std.

    The critic then starts as the reward model's normalised score, affine included: it predicts
    rewards on the scale on which they arrive.
    """
    std = max(stats.std, stats.std_floor)
    with torch.no_grad():
        model.head.bias.copy_((model.head.bias.float() - stats.mean) / std * weight)
        model.head.weight.copy_(model.head.weight.float() / std * weight)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Weights and formats in memory, before adapters and engines.

    Attributes:
        actor: causal LM ready to train.
        reference: frozen copy of it; None with LoRA on the actor, whose own base serves.
        reward: the stage-2 reward model; None where it is no source of rewards.
        critic: ready to train; with LoRA a `CriticOverReward` may hold the reward model as well.
            None where the estimator has none.
        stats: normalisation of the reward model's scores.
        chat_format: the actor's.
        reward_format: the reward model's; None where it reads the actor's ids as they are.
        texts: the other sources of rewards, by name.
        tokenizer, tokenizer_id: the actor's.
        actor_base, critic_base: where the weights came from, in words; adapters store it.
    """

    actor: Any
    reference: Any | None
    reward: ScalarHeadModel | None
    critic: ScalarHeadModel | None
    stats: ScoreStats
    chat_format: ChatFormat
    reward_format: ChatFormat | None = None
    texts: Mapping[str, TextSource] = field(default_factory=dict)
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
        inputs: paths of `actor`, and of `reward` where the stage-2 model is a source.
        dist: process group and device.
        total_optimizer_steps: length of the learning-rate schedules.

    Raises:
        ConfigError: a path is no usable model, or the lengths exceed the model's positions.
    """
    return assemble(load_parts(config, inputs, dist), config, dist, total_optimizer_steps)


@within("load")
def assemble(parts: Parts, config: RunConfig, dist: Dist, total_optimizer_steps: int) -> PPOModels:
    """Put adapters on models in memory and wrap the trained two in engines.

    Args:
        parts: the models; actor and critic are changed in place.
        config: the run.
        dist: process group and device.
        total_optimizer_steps: length of the learning-rate schedules.
    """
    ppo = config.ppo
    trained: list[tuple[Any, PolicySettings | CriticSettings, str, str]] = [
        (parts.actor, ppo.actor, "ppo.actor.lora", parts.actor_base)
    ]
    if parts.critic is not None:
        trained.append((parts.critic.backbone, ppo.critic, "ppo.critic.lora", parts.critic_base))
    for model, settings, setting, base in trained:
        if settings.lora.enabled:
            attach(model, settings.lora, seed=config.seed, base=base, setting=setting)
    make_engine = partial(
        engine_for,
        dtype=resolve_dtype(config.model.dtype, dist.device),
        micro_batch_size=ppo.micro_batch_size,
        dist=dist,
    )
    warm_up = ppo.critic_warmup_updates * ppo.ppo_epochs * ppo.mini_batches
    actor = make_engine(
        parts.actor,
        ppo.actor,
        total_steps=max(1, total_optimizer_steps - warm_up),
        hybrid=config.hybrid_engine,
    )
    actor.generator.lora_rollout = ppo.actor.lora.rollout
    critic = None
    if parts.critic is not None:
        critic = make_engine(parts.critic, ppo.critic, total_steps=total_optimizer_steps)
    stage2 = None
    if parts.reward is not None:
        reward: ScalarHeadModel | RewardView = parts.reward
        if isinstance(parts.critic, CriticOverReward):
            reward = RewardView(critic)
        else:
            parts.reward.eval().requires_grad_(False)
        stage2 = RewardScorer(
            model=reward,
            stats=parts.stats,
            settings=ppo,
            actor_format=parts.chat_format,
            own_format=parts.reward_format,
        )
    return PPOModels(
        actor=actor,
        critic=critic,
        reference=ReferenceView(actor) if parts.reference is None else parts.reference,
        scorer=combine(ppo, stage2, parts.texts, parts.chat_format, dist),
        tokenizer=parts.tokenizer,
        chat_format=parts.chat_format,
        tokenizer_id=parts.tokenizer_id,
        suppress_ids=() if ppo.stop_at_eos else tuple(parts.chat_format.stop_ids),
    )


@within("load")
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
        tokenizer,
        config.data.chat_format,
        extra_stop_ids=eos_token_ids(actor),
        template_file=config.data.chat_template,
    )

    # The sources of rewards; the stage-2 model is one of them unless others are named.
    for_critic = loading | {"gradient_checkpointing": ppo.critic.gradient_checkpointing}
    stage2 = None
    if "reward" in inputs:
        stage2 = load_stage2(
            inputs["reward"],
            chat_format=chat_format,
            default_format=config.data.chat_format,
            actor=actor,
            trust_remote_code=trust,
            loading=for_critic,
        )
    texts = load_text_sources(config, dist, chat_format)

    # The critic's beginning, where the advantages come from one.
    critic: ScalarHeadModel | None = None
    if not ppo.has_critic:
        pass
    elif stage2 is None or not stage2.same_ids:
        # No reward model that reads the actor's ids: the critic starts from the actor's own
        # backbone, with a head of zeros so that its first values are neutral.
        critic = new_scalar_model(inputs["actor"], seed=config.seed, **for_critic)
        torch.nn.init.zeros_(critic.head.weight)
    else:
        if ppo.critic.lora.enabled:
            critic = over_reward(stage2.model)
        else:
            critic = copy.deepcopy(stage2.model)
        source, stats = model_source(ppo, stage2.stats)
        fold_normalisation(critic, stats, source.weight)

    # The reference: with LoRA the actor's own base. Copied in memory, since loading can be slow.
    reference = None
    if not ppo.actor.lora.enabled:
        reference = copy.deepcopy(actor).eval().requires_grad_(False)
    return Parts(
        actor=actor,
        reference=reference,
        reward=stage2.model if stage2 else None,
        critic=critic,
        stats=stage2.stats if stage2 else ScoreStats(),
        chat_format=chat_format,
        reward_format=stage2.own_format if stage2 else None,
        texts=texts,
        tokenizer=tokenizer,
        tokenizer_id=tokenizer_hash(tokenizer),
        actor_base=inputs["actor"],
        critic_base=inputs["reward" if stage2 and stage2.same_ids else "actor"],
    )


def over_reward(reward: ScalarHeadModel) -> CriticOverReward:
    """A critic that starts as the reward model, over the same backbone, with its own head."""
    return CriticOverReward(reward.backbone, copy.deepcopy(reward.head), reward.head)


def _check_lengths(ppo: PPOConfig, model: Any, path: str) -> None:
    positions = model_max_length(model.config)
    wanted = ppo.max_prompt_length + ppo.max_response_length
    if wanted > positions:
        raise ConfigError(
            f"ppo.max_prompt_length + ppo.max_response_length = {wanted} exceeds the {positions} "
            f"positions of {path}: lower one of them"
        )
