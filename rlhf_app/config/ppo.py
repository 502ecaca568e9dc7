"""Settings of stage 3."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_app.config.data import Sources
from rlhf_app.config.keep_best import check_keep_best
from rlhf_app.config.rewards import ONLY_MODEL, RewardSources
from rlhf_app.config.section import Section
from rlhf_app.config.trainable import CriticSettings, PolicySettings


class PPOConfig(Section):
    """Stage 3: PPO against the reward model (Schulman et al. 2017; Ouyang et al. 2022)."""

    actor: PolicySettings = Field(default_factory=PolicySettings, description="The policy.")
    critic: CriticSettings = Field(default_factory=CriticSettings, description="The value model.")
    updates: int | None = Field(
        None, ge=1, description="Rollout-and-update iterations; unset: one pass over the rows."
    )
    rollout_batch_size: int = Field(64, ge=1, description="Answers per update, all ranks.")
    answers_per_prompt: int = Field(
        1, ge=1, description="Answers to each prompt of an update; divides rollout_batch_size."
    )
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
    kl_coef: float = Field(0.1, ge=0, description="Weight of the KL penalty, at the start.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k1",
        description="Of the penalty, per token, with d = log pi - log pi_ref: d, d^2 / 2, or "
        "exp(-d) - 1 + d. The KL that is reported is always the sum of k1.",
    )
    kl_penalty: Literal["reward", "loss"] = Field(
        "reward",
        description="reward: subtracted from each token's reward. loss: kl_coef x its mean per "
        "token is added to the policy loss, with gradient (k2 or k3).",
    )
    kl_clamp: float | None = Field(
        None,
        gt=0,
        description="Most nats that a token's penalty in the reward counts, of either sign (10 is "
        "usual). Unset: no bound.",
    )
    kl_controller: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="adaptive: after each update kl_coef *= 1 + clip(kl / kl_target - 1, +-0.2) x "
        "answers / kl_horizon (Ziegler et al. 2019).",
    )
    kl_target: float = Field(
        6.0, gt=0, description="Nats per answer that adaptive aims at: summed over its tokens."
    )
    kl_horizon: float = Field(
        10_000.0, gt=0, description="Answers over which adaptive follows: larger is slower."
    )
    advantage_estimator: Literal["gae", "rloo", "reinforce_pp", "group"] = Field(
        "gae",
        description="gae: with a critic. The others have none: rloo, an answer's reward minus the "
        "mean of the others to its prompt (Ahmadian et al. 2024); reinforce_pp, whitened "
        "reward-to-go, minus the prompt's mean score where it has several answers (Hu 2025); "
        "group, (reward - mean) / std over the prompt's answers (GRPO, Shao et al. 2024).",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount; 1 for rloo and group.")
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="GAE lambda (Schulman et al. 2016); gae alone has it."
    )
    clip_range: float = Field(0.2, gt=0, description="Policy ratio clip.")
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Where the advantage is negative the loss is at most this times its size (Ye "
        "et al. 2020; 3 is usual). Unset: no bound.",
    )
    entropy_coef: float = Field(
        0.0, ge=0, description="Weight of an entropy bonus, nats per token, in the policy loss."
    )
    value_clip_range: float = Field(0.2, gt=0, description="Clip of the value change.")
    log_ratio_clamp: float = Field(
        20.0, gt=0, description="|log ratio| is clamped here before exp, against overflow."
    )
    whiten_rewards: bool = Field(
        False,
        description="(r - mean)/(std + 1e-8) + mean of the per-token rewards, over all action "
        "tokens of all ranks; gae and reinforce_pp.",
    )
    whiten_advantages: Literal["auto"] | bool = Field(
        "auto",
        description="(A - mean)/(std + 1e-8) over all action tokens of all ranks. auto: for gae "
        "and reinforce_pp, not for rloo and group.",
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
    length_penalty: float = Field(
        0.0, ge=0, description="Subtracted from the score for each token of the answer."
    )
    target_kl: float | None = Field(
        None, gt=0, description="Stop a PPO epoch loop when mean k3 per token exceeds this."
    )
    ptx_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the cross-entropy per token of pretraining text, added to the "
        "policy loss (InstructGPT's PPO-ptx: 27.8). 0: none.",
    )
    ptx_data: Sources = Field(
        (),
        description="That text: answers, or plain text in a column text. Unset: the rows of SFT.",
    )
    ptx_batch_size: int | None = Field(
        None,
        ge=1,
        description="Rows of it in each optimizer step of the actor, all ranks. Unset: as many "
        "as a mini-batch has answers.",
    )
    ema_decay: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Keep avg = decay x avg + (1 - decay) x actor, in fp32, after each of its "
        "optimizer steps, and write it to <output>/ppo/actor_ema (InstructGPT: 0.992). Unset: no.",
    )
    stop_kl: float | None = Field(
        None,
        gt=0,
        description="End training after an update whose answers had more nats of KL per answer "
        "than this. Unset: no limit.",
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
    def _text_is_used(self) -> Self:
        for name in ("ptx_data", "ptx_batch_size"):
            if self.ptx_coef == 0 and getattr(self, name):
                raise ValueError(f"{name} has no effect while ptx_coef is 0: set ptx_coef")
        return self

    @model_validator(mode="after")
    def _best_of_several_evaluations(self) -> Self:
        check_keep_best(self.keep_best, self.eval_every, "updates", self.updates)
        if self.keep_best_max_kl is not None and self.keep_best is None:
            raise ValueError(
                "keep_best_max_kl limits what keep_best may choose, which is unset: set keep_best "
                "to reward or gold, or leave keep_best_max_kl unset"
            )
        return self

    @property
    def has_critic(self) -> bool:
        """Whether a value model takes part; only GAE reads one."""
        return self.advantage_estimator == "gae"

    @property
    def whitens_advantages(self) -> bool:
        """`whiten_advantages`, decided."""
        if self.whiten_advantages == "auto":
            return self.advantage_estimator in ("gae", "reinforce_pp")
        return self.whiten_advantages

    @model_validator(mode="after")
    def _estimator_has_what_it_needs(self) -> Self:
        name = self.advantage_estimator
        if self.rollout_batch_size % self.answers_per_prompt:
            raise ValueError(
                f"rollout_batch_size {self.rollout_batch_size} is not divisible by "
                f"answers_per_prompt {self.answers_per_prompt}: change one of them"
            )
        if name in ("rloo", "group"):
            if self.answers_per_prompt < 2:
                raise ValueError(
                    f"advantage_estimator {name} compares answers to the same prompt: set "
                    "answers_per_prompt to 2 or more"
                )
            if self.gamma != 1.0:
                raise ValueError(
                    f"advantage_estimator {name} takes an answer as one action and has no "
                    "discount: set ppo.gamma to 1"
                )
            if self.whiten_rewards:
                raise ValueError(
                    f"advantage_estimator {name} has no per-token rewards: set whiten_rewards to "
                    "false"
                )
        if self.updates is not None and self.critic_warmup_updates >= self.updates:
            raise ValueError(
                f"critic_warmup_updates {self.critic_warmup_updates} leaves the actor none of the "
                f"{self.updates} updates: lower it, or raise ppo.updates"
            )
        if not self.has_critic and self.critic_warmup_updates:
            raise ValueError(
                f"advantage_estimator {name} has no critic to warm up: set critic_warmup_updates "
                "to 0"
            )
        return self

    @model_validator(mode="after")
    def _kl_settings_agree(self) -> Self:
        if self.kl_penalty == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_penalty loss with kl_estimator k1 has a gradient of mean 0: set kl_estimator "
                "to k2 or k3, or kl_penalty to reward"
            )
        if self.kl_controller == "adaptive" and self.kl_coef == 0:
            raise ValueError(
                "kl_controller adaptive multiplies kl_coef, and 0 stays 0: set kl_coef above 0, "
                "or kl_controller to fixed"
            )
        if self.kl_controller == "adaptive" and self.rollout_batch_size >= 5 * self.kl_horizon:
            # At most a fifth of answers / horizon comes off kl_coef in one update.
            raise ValueError(
                f"kl_controller adaptive with kl_horizon {self.kl_horizon:g} would take kl_coef to "
                f"0 or below in one update of {self.rollout_batch_size} answers: raise kl_horizon "
                "(10000 is usual), or lower rollout_batch_size"
            )
        return self
