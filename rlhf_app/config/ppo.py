"""Settings of stage 3."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_app.config.keep_best import check_keep_best
from rlhf_app.config.rewards import ONLY_MODEL, RewardSources
from rlhf_app.config.section import Section
from rlhf_app.config.trainable import CriticSettings, PolicySettings


class PPOConfig(Section):
    """Stage 3: PPO against the reward model (Schulman et al. 2017; Ouyang et al. 2022)."""

    actor: PolicySettings = Field(default_factory=PolicySettings, description="The policy.")
    critic: CriticSettings = Field(default_factory=CriticSettings, description="The value model.")
    updates: int | None = Field(
        None, ge=1, description="Rollout-and-update iterations; unset: one pass over the prompts."
    )
    rollout_batch_size: int = Field(64, ge=1, description="Answers per update, all ranks.")
    ppo_epochs: int = Field(1, ge=1, description="Passes over each rollout batch.")
    mini_batches: int = Field(
        1, ge=1, description="Optimizer steps per PPO epoch: the rollout batch is cut into these."
    )
    micro_batch_size: int = Field(8, ge=1, description="Sequences per forward on one rank.")
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens of a forward on one rank, padding included, in place of "
        "micro_batch_size; a longer sequence runs alone. The objective is the same.",
    )
    score_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="The same where no gradient is needed: reward, values and evaluations. "
        "Unset: 4 micro-batches on CUDA, 1 elsewhere.",
    )
    max_prompt_length: int = Field(
        256, ge=1, description="Longer prompts are left out and counted."
    )
    max_response_length: int = Field(256, ge=1, description="Most tokens of one answer.")
    temperature: float = Field(
        1.0, gt=0, description="Of the rollout, and of old, new and reference log-probs alike."
    )
    stop_at_eos: bool = Field(
        True, description="False: EOS cannot be sampled and every answer has full length."
    )
    kl_coef: float = Field(0.1, ge=0, description="Weight of the per-token KL penalty (k1).")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="GAE lambda (Schulman et al. 2016).")
    clip_range: float = Field(0.2, gt=0, description="Policy ratio clip.")
    value_clip_range: float = Field(0.2, gt=0, description="Clip of the value change.")
    log_ratio_clamp: float = Field(
        20.0, gt=0, description="|log ratio| is clamped here before exp, against overflow."
    )
    whiten_advantages: bool = Field(
        True, description="(A - mean)/(std + 1e-8) over all action tokens of all ranks."
    )
    rewards: RewardSources = Field(
        ONLY_MODEL,
        description="Sources of the score, summed with their weights: model (stage 2's), a "
        "classifier, a function or an HTTP address; see docs/rewards.md.",
    )
    reward_clip: float = Field(
        5.0, gt=0, description="Normalised scores of the reward model are clipped to +-this."
    )
    missing_eos: Literal["subtract", "replace", "ignore"] = Field(
        "subtract", description="What an answer cut by length loses."
    )
    missing_eos_penalty: float = Field(
        1.0, ge=0, description="Size of that loss; ignored when stop_at_eos is false."
    )
    target_kl: float | None = Field(
        None, gt=0, description="Stop a PPO epoch loop when mean k3 per token exceeds this."
    )
    critic_warmup_updates: int = Field(0, ge=0, description="First updates train the critic only.")
    eval_every: int = Field(0, ge=0, description="Updates between evaluations; 0: start and end.")
    eval_prompts: int = Field(256, ge=1, description="At most this many prompts an evaluation.")
    keep_best: Literal["reward", "gold"] | None = Field(
        None,
        description="The artifacts hold the weights of the evaluation that was best by this; gold "
        "needs --gold. Unset: the last weights.",
    )
    keep_best_max_kl: float | None = Field(
        None,
        gt=0,
        description="Of keep_best: evaluations with more nats of KL per answer do not count.",
    )
    samples: int = Field(
        4,
        ge=0,
        description="Held-out prompts whose answers are in samples.jsonl and the final table.",
    )
    save_critic: bool = Field(True, description="Write the critic beside the actor.")

    @model_validator(mode="after")
    def _best_of_several_evaluations(self) -> Self:
        check_keep_best(self.keep_best, self.eval_every, "updates")
        if self.keep_best_max_kl is not None and self.keep_best is None:
            raise ValueError(
                "keep_best_max_kl limits what keep_best may choose, which is unset: set keep_best "
                "to reward or gold, or leave keep_best_max_kl unset"
            )
        return self
