"""Every setting of a run: the single source of YAML keys, defaults, help texts and docs.

All models are frozen and refuse unknown keys. Paths to a setting are dotted, as in
`--set ppo.kl_coef=0.05` or

    ppo:
      kl_coef: 0.05

This package stays free of torch so that `rlhf --help` is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_app.config.checkpoint import CheckpointConfig
from rlhf_app.config.data import ChatFormat, DataConfig, SourceConfig, Sources, parse_source
from rlhf_app.config.lora import (
    CriticLora,
    LoraDefaults,
    LoraSettings,
    PolicyLora,
    apply_defaults,
)
from rlhf_app.config.ppo import PPOConfig
from rlhf_app.config.section import Location, Section, clean_path
from rlhf_app.config.trainable import (
    CriticSettings,
    PolicySettings,
    RewardConfig,
    SFTConfig,
    TrainableSettings,
    ZeroStage,
)

__all__ = [
    "STAGES",
    "ChatFormat",
    "CheckpointConfig",
    "CriticLora",
    "CriticSettings",
    "DataConfig",
    "DeploymentConfig",
    "DeploymentType",
    "Dtype",
    "GoldConfig",
    "HybridEngineSettings",
    "JobName",
    "Location",
    "LoraDefaults",
    "LoraSettings",
    "ModelConfig",
    "PPOConfig",
    "PolicyLora",
    "PolicySettings",
    "RewardConfig",
    "RunConfig",
    "SFTConfig",
    "Section",
    "SourceConfig",
    "Sources",
    "StageName",
    "TrainableSettings",
    "ZeroStage",
    "parse_source",
]

StageName = Literal["sft", "reward", "ppo"]
#: What worker processes run: a stage, or the checks of `rlhf verify`.
JobName = StageName | Literal["verify"]
STAGES: tuple[StageName, ...] = ("sft", "reward", "ppo")

DeploymentType = Literal["auto", "cpu", "single_gpu", "single_node"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]


class ModelConfig(Section):
    """Which models take part, and how they are held in memory."""

    actor: Location | None = Field(
        None,
        description="Base causal LM: directory, GGUF file or Hub id. Unset: the embedded default.",
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


class HybridEngineSettings(Section):
    """DeepSpeed's `hybrid_engine` keys and one more, read by our engine and never passed on."""

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
    compile_decode: Literal["auto"] | bool = Field(
        "auto",
        description="CPU, fp32: decode with kernels built by the machine's C++ compiler, once. "
        "auto: where there is one, for rollouts of 2048 answer tokens or more.",
    )


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
    hang_minutes: float | None = Field(
        20.0,
        gt=0,
        description="End a run in which no worker begins another phase of training for so long; "
        "null: wait for ever.",
    )


class RunConfig(Section):
    """One run, whole."""

    seed: int = Field(
        1234, ge=0, le=2**31 - 1, description="Of data order, initialisation and sampling."
    )
    deterministic: bool = Field(
        False,
        description="CUDA: equal runs give equal bits, at some cost in speed; on the CPU they do "
        "in any case.",
    )
    output_dir: Annotated[Path, BeforeValidator(clean_path)] = Field(
        Path("output"), description="The run directory."
    )
    private: bool = Field(
        False,
        description="The run directory is readable by its owner alone (mode 0700), also the files "
        "within.",
    )
    stages: tuple[StageName, ...] = Field(STAGES, description="Stages to run, in order.")
    deployment: DeploymentConfig = Field(default_factory=DeploymentConfig, description="Workers.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="What survives an interruption."
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="Models.")
    data: DataConfig = Field(default_factory=DataConfig, description="Data.")
    lora: LoraDefaults = Field(
        default_factory=LoraDefaults, description="Low-rank adapters of every model."
    )
    sft: SFTConfig = Field(default_factory=SFTConfig, description="Stage 1.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Stage 2.")
    ppo: PPOConfig = Field(default_factory=PPOConfig, description="Stage 3.")
    gold: GoldConfig = Field(default_factory=GoldConfig, description="Independent score.")
    hybrid_engine: HybridEngineSettings = Field(
        default_factory=HybridEngineSettings, description="Rollout engine."
    )

    @model_validator(mode="before")
    @classmethod
    def _lora_of_all_models(cls, values: object) -> object:
        return apply_defaults(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _stages_in_order(self) -> RunConfig:
        order = [STAGES.index(s) for s in self.stages]
        if not order or order != sorted(set(order)):
            raise ValueError("stages: name each of sft, reward, ppo at most once, in that order")
        return self

    @model_validator(mode="after")
    def _streams_have_an_end(self) -> RunConfig:
        if not self.data.streaming:
            return self
        ends = {
            "sft": ("sft.max_steps", self.sft.max_steps),
            "reward": ("reward.max_steps", self.reward.max_steps),
            "ppo": ("ppo.updates", self.ppo.updates),
        }
        for stage in self.stages:
            name, value = ends[stage]
            if value is None:
                raise ValueError(f"data.streaming: a stream has no end; set {name}")
        if "ppo" in self.stages and self.ppo.ptx_coef:
            raise ValueError(
                "ppo.ptx_coef: the text is drawn from all rows, which data.streaming does not "
                "know; leave one of them out"
            )
        return self
