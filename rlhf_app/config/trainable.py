"""Settings of optimisation: what every trained model has, and each stage's own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_app.config.lora import CriticLora, LoraSettings, PolicyLora
from rlhf_app.config.section import Section

ZeroStage = Literal[0, 1, 2, 3]


class TrainableSettings(Section):
    """How one model is optimised. DeepSpeed does the work; these become its config."""

    learning_rate: float = Field(gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.0, ge=0, description="Not applied to biases and norms.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Adam betas.")
    eps: float = Field(1e-8, gt=0, description="Adam epsilon.")
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Shape after the warm-up; cosine and linear end at 0."
    )
    warmup_ratio: float = Field(0.03, ge=0, lt=1, description="Share of steps spent warming up.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradient clipping; 0 turns it off.")
    zero_stage: ZeroStage = Field(0, description="DeepSpeed ZeRO stage.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations: less memory.")
    lora: LoraSettings = Field(default_factory=LoraSettings, description="Low-rank adapters.")

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate that the optimizer gets: the adapters' own where there are any."""
        return self.lora.learning_rate if self.lora.enabled else self.learning_rate


class SFTConfig(TrainableSettings):
    """Stage 1: supervised fine-tuning."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    epochs: float = Field(1.0, gt=0, description="Passes over the data.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps.")
    batch_size: int = Field(32, ge=1, description="Sequences per optimizer step, all ranks.")
    micro_batch_size: int = Field(8, ge=1, description="Sequences per forward on one rank.")
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens of a forward on one rank, padding included, in place of "
        "micro_batch_size; a longer sequence runs alone. The objective is the same.",
    )
    eval_every: int = Field(0, ge=0, description="Optimizer steps between evaluations; 0: ends.")
    samples: int = Field(4, ge=0, description="Held-out prompts answered after training.")
    sample_tokens: int = Field(64, ge=1, description="Tokens of each such answer.")


class RewardConfig(TrainableSettings):
    """Stage 2: the reward model, trained on pairs."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    epochs: float = Field(1.0, gt=0, description="Passes over the data.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps.")
    batch_size: int = Field(64, ge=1, description="Pairs per optimizer step, all ranks.")
    micro_batch_size: int = Field(8, ge=1, description="Pairs per forward on one rank.")
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens of a forward on one rank, both answers and padding included, in "
        "place of micro_batch_size; a longer pair runs alone. The objective is the same.",
    )
    eval_every: int = Field(0, ge=0, description="Optimizer steps between evaluations; 0: ends.")
    loss: Literal["final_token", "token_wise"] = Field(
        "final_token",
        description="-log sigmoid of the score gap at the last token, or DeepSpeed-Chat's mean "
        "over every token after the two answers part.",
    )
    center_coef: float = Field(
        0.0, ge=0, description="Weight of mean((r_chosen + r_rejected)^2); 0.01 centres scores."
    )
    use_margin: bool = Field(True, description="Subtract a row's margin where the data has one.")
    std_floor: float = Field(0.01, gt=0, description="Least std used to normalise scores.")


class PolicySettings(TrainableSettings):
    """Optimisation of the actor."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        "linear", description="Shape after the warm-up; linear and cosine end at 0."
    )
    lora: PolicyLora = Field(default_factory=PolicyLora, description="Low-rank adapters.")


class CriticSettings(TrainableSettings):
    """Optimisation of the critic."""

    learning_rate: float = Field(5e-6, gt=0, description="Peak learning rate.")
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        "linear", description="Shape after the warm-up; linear and cosine end at 0."
    )
    lora: CriticLora = Field(default_factory=CriticLora, description="Low-rank adapters.")
