"""Settings of optimisation: what every trained model has, and each stage's own."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_app.config.keep_best import check_keep_best
from rlhf_app.config.lora import CriticLora, LoraSettings, PolicyLora
from rlhf_app.config.section import Section

ZeroStage = Literal[0, 1, 2, 3]


class TrainableSettings(Section):
    """How one model is optimised. DeepSpeed does the work; these become its config.

    Memory of a fully trained model in half precision, in bytes a parameter: weights 2, gradients
    of a micro-batch 2, their fp32 sum over micro-batches 4 (none with `grad_accum_dtype: bf16`,
    where they add up in place), fp32 masters 4 and Adam's moments 8 (on the host with
    `offload_optimizer: cpu`). That is 20, down to 4 on the GPU. ZeRO 1 divides the last 12 by
    the number of ranks, ZeRO 2 the gradients as well, ZeRO 3 all of it.
    """

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
    offload_optimizer: Literal["none", "cpu"] = Field(
        "none",
        description="cpu: the fp32 masters and Adam's moments stay in host memory, where the step "
        "is made. Turns ZeRO 0 into 1.",
    )
    grad_accum_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="What micro-batches of a bf16 model add their gradients up in. bf16 saves 4 "
        "bytes a parameter and loses small contributions.",
    )
    adam_kernel: Literal["torch", "deepspeed", "auto"] = Field(
        "torch",
        description="Whose fused AdamW steps. deepspeed is compiled at the first start and needs "
        "CUDA and nvcc; auto: deepspeed where it can be built, else torch.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations: less memory.")
    lora: LoraSettings = Field(default_factory=LoraSettings, description="Low-rank adapters.")

    @model_validator(mode="after")
    def _kernel_runs_where_the_optimizer_is(self) -> Self:
        if self.adam_kernel == "deepspeed" and self.offload_optimizer == "cpu":
            raise ValueError(
                "adam_kernel deepspeed runs on the GPU and offload_optimizer cpu steps on the "
                "host: set adam_kernel to torch, or offload_optimizer to none"
            )
        return self

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
    keep_best: Literal["loss"] | None = Field(
        None,
        description="The artifact holds the weights of the evaluation that was best by this. "
        "Unset: the last weights.",
    )
    samples: int = Field(4, ge=0, description="Held-out prompts answered after training.")
    sample_tokens: int = Field(64, ge=1, description="Tokens of each such answer.")

    @model_validator(mode="after")
    def _best_of_several_evaluations(self) -> Self:
        check_keep_best(self.keep_best, self.eval_every, "optimizer steps", self.max_steps)
        return self


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
    keep_best: Literal["accuracy", "loss"] | None = Field(
        None,
        description="The artifact holds the weights of the evaluation that was best by this. "
        "Unset: the last weights.",
    )
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

    @model_validator(mode="after")
    def _best_of_several_evaluations(self) -> Self:
        check_keep_best(self.keep_best, self.eval_every, "optimizer steps", self.max_steps)
        return self


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
