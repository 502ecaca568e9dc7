"""Every setting of a run: the single source of YAML keys, defaults, help texts and docs.

All models are frozen and refuse unknown keys. Paths to a setting are dotted, as in
`--set ppo.kl_coef=0.05` or

    ppo:
      kl_coef: 0.05

This module stays free of torch so that `rlhf --help` is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

StageName = Literal["sft", "reward", "ppo"]
STAGES: tuple[StageName, ...] = ("sft", "reward", "ppo")

DeploymentType = Literal["auto", "cpu", "single_gpu", "single_node"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]
ChatFormat = Literal["auto", "template", "human_assistant", "plain"]
ZeroStage = Literal[0, 1, 2, 3]


class Section(BaseModel):
    """Base of all settings groups: immutable, unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )


_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, on Linux


def _clean_path(value: object) -> object:
    """Refuse what no file can be called, and expand `~` as a shell does in flags."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("expected a path or name, not an empty one")
        if "\0" in value:
            raise ValueError("expected a path or name without a null character")
        if len(value.encode(errors="replace")) > _LONGEST_PATH or any(
            len(part.encode(errors="replace")) > _LONGEST_NAME for part in value.split("/")
        ):
            raise ValueError("too long for the name of a file")
    if isinstance(value, str) and (value == "~" or value.startswith("~/")):
        return str(Path(value).expanduser())
    return value


Location = Annotated[str, BeforeValidator(_clean_path)]


class ModelConfig(Section):
    """Which models take part, and how they are held in memory."""

    actor: Location | None = Field(
        None,
        description="Base causal LM: a directory or Hub id. Unset: the embedded default model.",
    )
    reward: Location | None = Field(
        None,
        description="Base of the reward model. Unset: facebook/opt-350m for OPT actors on the "
        "Hub, else the SFT artifact (or the actor when SFT is not run).",
    )
    dtype: Dtype = Field("auto", description="auto is bf16 on CUDA and fp32 on CPU.")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="Attention of the training forward."
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code shipped with a model. Off unless asked."
    )


class SourceConfig(Section):
    """One data source and its share in the blend."""

    path: Location = Field(
        description="File, directory or Hub dataset id (id:config for a config)."
    )
    weight: float = Field(
        1.0, gt=0, description="Relative weight in the blend; 1 takes every row once."
    )
    split: str | None = Field(
        None, description="Split of a Hub dataset; unset: train (validation/test for evaluation)."
    )
    columns: dict[str, str] = Field(
        {},
        description="Columns of other names, as ours: theirs; ours are prompt, response, chosen, "
        "rejected, messages, system, input, margin.",
    )


def parse_source(text: str) -> dict[str, object]:
    """Split `path` or `path=weight`, the short form of a source.

    Only a number after the last `=` is a weight, so that a path may hold an equals sign.
    """
    path, equals, weight = text.rpartition("=")
    if not equals:
        return {"path": text}
    try:
        return {"path": path, "weight": float(weight)}
    except ValueError:
        return {"path": text}


def _expand_sources(value: object) -> object:
    """Let a list of sources hold short forms, and a single source stand alone."""
    items = [value] if isinstance(value, str | dict) else value
    if not isinstance(items, list | tuple):
        return value
    return [parse_source(item) if isinstance(item, str) else item for item in items]


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_expand_sources)]


class DataConfig(Section):
    """What is trained and evaluated on, and how text becomes tokens."""

    sources: Sources = Field(
        (), description="Preference or instruction data, split across the stages."
    )
    sft: Sources = Field((), description="Replaces the split for SFT.")
    reward: Sources = Field((), description="Replaces the split for the RM.")
    ppo: Sources = Field((), description="Replaces the split for PPO prompts.")
    eval: Sources = Field(
        (), description="Held-out data for every stage; unset: a share of each stage's rows."
    )
    split: tuple[float, float, float] | Literal["shared"] = Field(
        (2.0, 4.0, 4.0),
        description="Shares of SFT, reward and PPO by prompt hash; shared gives every row to "
        "every stage.",
    )
    eval_fraction: float = Field(
        0.05, ge=0, lt=1, description="Share of prompts held out when data.eval is unset."
    )
    eval_limit: int = Field(512, ge=1, description="At most this many evaluation rows a stage.")
    chat_format: ChatFormat = Field(
        "auto",
        description="auto: the tokenizer's chat template if it has one, else "
        "'\\n\\nHuman: ...\\n\\nAssistant:'. plain: prompt and response as they stand.",
    )
    max_length: int | None = Field(
        None,
        ge=2,
        description="Tokens of prompt + response in SFT and the RM; unset: the smaller of 512 "
        "and the model's positions.",
    )
    sft_loss_on: Literal["response", "all"] = Field(
        "response", description="Tokens that carry loss in SFT."
    )
    max_bad_fraction: float = Field(
        0.1, ge=0, le=1, description="Stop when more than this share of a source is unusable."
    )

    @field_validator("split", mode="before")
    @classmethod
    def _shares_from_text(cls, value: object) -> object:
        if isinstance(value, str) and value != "shared":
            value = value.split(",")
        if isinstance(value, list | tuple):
            try:
                shares = [float(share) for share in value]
            except (TypeError, ValueError):
                shares = []
            if len(shares) != 3:
                raise ValueError("expected three shares such as 2,4,4, or shared")
            return shares
        return value

    @field_validator("split")
    @classmethod
    def _shares(cls, value: object) -> object:
        if isinstance(value, tuple) and (min(value) < 0 or sum(value) <= 0):
            raise ValueError("shares must be >= 0 and not all 0, for example 2,4,4")
        return value


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


class SFTConfig(TrainableSettings):
    """Stage 1: supervised fine-tuning."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    epochs: float = Field(1.0, gt=0, description="Passes over the data.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps.")
    batch_size: int = Field(32, ge=1, description="Sequences per optimizer step, all ranks.")
    micro_batch_size: int = Field(8, ge=1, description="Sequences per forward on one rank.")
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


class CriticSettings(TrainableSettings):
    """Optimisation of the critic."""

    learning_rate: float = Field(5e-6, gt=0, description="Peak learning rate.")
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        "linear", description="Shape after the warm-up; linear and cosine end at 0."
    )


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
    reward_clip: float = Field(5.0, gt=0, description="Normalised scores are clipped to +-this.")
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
    samples: int = Field(4, ge=0, description="Prompts shown side by side in the final table.")
    save_critic: bool = Field(True, description="Write the critic beside the actor.")


class HybridEngineSettings(Section):
    """DeepSpeed's `hybrid_engine` keys, read by our engine and never passed on."""

    enabled: bool = Field(True, description="False: native Hugging Face generate in rollouts.")
    max_out_tokens: int | None = Field(
        None, ge=1, description="Most tokens of a row (prompt + answer); unset: sized by the run."
    )
    inference_tp_size: int = Field(1, ge=1, description="Tensor parallel size of the rollout.")
    release_inference_cache: bool = Field(
        False, description="Give the KV workspace back after each rollout."
    )
    pin_parameters: bool = Field(True, description="ZeRO-3: gather once per rollout.")
    tp_gather_partition_size: int = Field(8, ge=1, description="Layers gathered at a time.")
    enable_cuda_graph: bool = Field(True, description="Capture the decode step where possible.")


class GoldConfig(Section):
    """A score the reward model never sees, tracked beside it."""

    scorer: str | None = Field(
        None,
        description="module:function taking (prompts, responses) and returning one float each.",
    )


class DeploymentConfig(Section):
    """Where the workers run."""

    type: DeploymentType = Field(
        "auto", description="auto: single_gpu where CUDA is present, else cpu."
    )
    num_processes: int | None = Field(
        None, ge=1, description="Worker processes; unset: 1, or every GPU for single_node."
    )


class RunConfig(Section):
    """One run, whole."""

    seed: int = Field(
        1234, ge=0, le=2**31 - 1, description="Of data order, initialisation and sampling."
    )
    output_dir: Annotated[Path, BeforeValidator(_clean_path)] = Field(
        Path("output"), description="The run directory."
    )
    stages: tuple[StageName, ...] = Field(STAGES, description="Stages to run, in order.")
    deployment: DeploymentConfig = Field(default_factory=DeploymentConfig, description="Workers.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="Models.")
    data: DataConfig = Field(default_factory=DataConfig, description="Data.")
    sft: SFTConfig = Field(default_factory=SFTConfig, description="Stage 1.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Stage 2.")
    ppo: PPOConfig = Field(default_factory=PPOConfig, description="Stage 3.")
    gold: GoldConfig = Field(default_factory=GoldConfig, description="Independent score.")
    hybrid_engine: HybridEngineSettings = Field(
        default_factory=HybridEngineSettings, description="Rollout engine."
    )

    @model_validator(mode="after")
    def _stages_in_order(self) -> RunConfig:
        order = [STAGES.index(s) for s in self.stages]
        if not order or order != sorted(set(order)):
            raise ValueError("stages: name each of sft, reward, ppo at most once, in that order")
        return self
