"""A language model's trunk with one number per token: reward model and critic.

On disk it is a Hugging Face directory in the layout of `AutoModelForSequenceClassification`
with one label (keys `<base_model_prefix>.*` and `score.weight`), so that plain transformers
can load it where the family has such a class. Two things are ours: `score.bias`, which
transformers ignores (its scores are then lower or higher by that constant), and
`reward_config.json` with the statistics that normalise scores.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_app.errors import ConfigError
from rlhf_app.models.load import load_config, load_pretrained, prepare_for_training
from rlhf_app.models.lora import ADAPTER, has_adapters, merge_state, save_adapter
from rlhf_app.training.distributed import Dist
from rlhf_app.training.error_phase import within
from rlhf_app.training.files import atomic_directory, atomic_write_json
from rlhf_app.training.saving import gather_state_dict, unwrap

REWARD_FILE = "reward_config.json"


class ScalarHead(nn.Linear):
    """Linear(d, 1) that computes in fp32 whatever its weights are stored in.

    Args:
        width: size of the hidden state.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps hidden states (..., d) of any dtype to fp32 (..., 1)."""
        with torch.autocast(input.device.type, enabled=False):
            return nn.functional.linear(input.float(), self.weight.float(), self.bias.float())


class ScalarHeadModel(nn.Module):
    """Trunk plus scalar head.

    Args:
        backbone: a Hugging Face base model (no language-model head).
        head: maps its last hidden state to one number.
    """

    def __init__(self, backbone: Any, head: ScalarHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    @property
    def config(self) -> Any:
        """The trunk's config."""
        return self.backbone.config

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores every prefix of every row.

        Args:
            input_ids: int64 (B, T), left-aligned. Padding on the right needs no mask:
                attention is causal.
            position_ids: int64 (B, T) or (1, T), or None for 0..T-1.

        Returns:
            values_BT: fp32 (B, T).
        """
        return self.apply_head(self.head, input_ids, position_ids)

    def apply_head(
        self, head: ScalarHead, input_ids: torch.Tensor, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """`forward` with a head of the caller's choice, fp32 (B, T)."""
        positions = {} if position_ids is None else {"position_ids": position_ids}
        hidden = self.backbone(input_ids=input_ids, use_cache=False, **positions)
        values_BT1: torch.Tensor = head(hidden.last_hidden_state)
        return values_BT1.squeeze(-1)


@dataclass(frozen=True)
class ScoreStats:
    """Mean and standard deviation of held-out scores, chosen and rejected alike.

    Attributes:
        mean: of the raw scores.
        std: of the raw scores, population form.
        std_floor: least divisor, so that a flat reward model is not blown up to noise.
    """

    mean: float = 0.0
    std: float = 1.0
    std_floor: float = 0.01

    def normalise(self, raw: torch.Tensor, clip: float) -> torch.Tensor:
        """clip((raw - mean) / max(std, std_floor), +-clip), any shape; NaN for an infinite raw."""
        clipped = ((raw - self.mean) / max(self.std, self.std_floor)).clamp(-clip, clip)
        # The clip must not make an ordinary score of an overflow.
        return torch.where(raw.isfinite(), clipped, torch.nan)


@dataclass(frozen=True)
class RewardFacts:
    """What must be known to use a reward model's scores.

    Attributes:
        stats: normalisation of the scores.
        pad_token_id: of its tokenizer.
        eos_token_ids: tokens that end an answer; scores are read at such a token.
        chat_format: how prompts were rendered in training.
        tokenizer_hash: to tell whether another model shares the tokenizer.
    """

    stats: ScoreStats = field(default_factory=ScoreStats)
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_format: str = ""
    tokenizer_hash: str = ""


def hidden_width(config: Any) -> int:
    """Size of a trunk's last hidden state. OPT-350m projects it down to `word_embed_proj_dim`."""
    text = config.get_text_config()
    return int(getattr(text, "word_embed_proj_dim", None) or text.hidden_size)


@within("load")
def new_scalar_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    setting: str = "model.reward",
) -> ScalarHeadModel:
    """Puts a fresh head on the trunk of a language model.

    The head's weights are N(0, 1/sqrt(d+1)) and its bias is 0 (Stiennon et al. 2020), so
    that first scores are small and the loss of a pair starts near log 2.

    Args:
        path: directory or Hub id of a causal LM (an SFT artifact, say) or base model.
        dtype: of the parameters.
        device: where they go.
        seed: of the head; the same on every rank.
        attn_implementation: of the training forward.
        trust_remote_code: run code that the model brings.
        gradient_checkpointing: recompute activations in the backward.
        setting: the setting that named the path, for error messages.

    Raises:
        ConfigError: as `load_causal_lm`.
    """
    backbone = _load_backbone(
        path, dtype, device, attn_implementation, trust_remote_code, gradient_checkpointing, setting
    )
    width = hidden_width(backbone.config)
    head = ScalarHead(width)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        head.weight.normal_(0.0, 1.0 / math.sqrt(width + 1), generator=generator)
        head.bias.zero_()
    return ScalarHeadModel(backbone, head.to(device, dtype)).train()


def load_scalar_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    setting: str = "model.reward",
) -> ScalarHeadModel:
    """Loads a saved reward model or critic with exactly its scores.

    A sequence classifier with one label that another tool wrote loads as well; it has no
    bias, which is then 0.

    Args:
        path: directory written by `save_scalar_model`, or such a classifier's.
        dtype: of the parameters.
        device: where they go.
        attn_implementation: of the training forward.
        trust_remote_code: run code that the model brings.
        gradient_checkpointing: recompute activations in the backward.
        setting: the setting that named the path, for error messages.

    Raises:
        ConfigError: as `load_causal_lm`, or the checkpoint has no one-label head.
    """
    backbone = _load_backbone(
        path, dtype, device, attn_implementation, trust_remote_code, gradient_checkpointing, setting
    )
    stored = _read_tensors(path, ("score.weight", "score.bias"))
    ours = (Path(path) / REWARD_FILE).is_file()
    needed = ("score.weight", "score.bias") if ours else ("score.weight",)
    absent = [name for name in needed if name not in stored]
    if absent:
        raise ConfigError(
            f"{setting} {path}: no {' and no '.join(absent)} in the checkpoint: "
            "it is no reward model; train one with the reward stage"
        )
    width = hidden_width(backbone.config)
    if stored["score.weight"].shape != (1, width):
        raise ConfigError(
            f"{setting} {path}: the head has shape {tuple(stored['score.weight'].shape)}, "
            f"a reward model has (1, {width})"
        )
    head = ScalarHead(width)
    with torch.no_grad():
        head.weight.copy_(stored["score.weight"])
        head.bias.copy_(stored.get("score.bias", torch.zeros(1)))
    return ScalarHeadModel(backbone, head.to(device, dtype)).train()


def read_reward_facts(path: str) -> RewardFacts:
    """Reads `reward_config.json`; defaults (mean 0, std 1) where there is none."""
    file = Path(path) / REWARD_FILE
    if not file.is_file():
        return RewardFacts()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        values["stats"] = ScoreStats(**values["stats"])
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
        return RewardFacts(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: not readable ({error}); run the reward stage again") from error


@within("saving")
def save_scalar_model(
    engine_or_model: Any, tokenizer: Any, directory: Path, dist: Dist, facts: RewardFacts
) -> None:
    """Writes the model, its tokenizer and `reward_config.json`.

    LoRA adapters are merged into the trunk that is written, not into the model; alone, with
    the head's weights, they are written to `adapter/` in the directory.

    The main process writes; every rank must call, and returns when the artifact is there.

    Args:
        engine_or_model: a `ScalarHeadModel`, or an engine around it.
        tokenizer: saved beside it.
        directory: replaced as a whole when writing has succeeded.
        dist: this process's place.
        facts: statistics and format.
    """
    from huggingface_hub import save_torch_state_dict

    model = unwrap(engine_or_model)
    state = gather_state_dict(model, dist)
    if dist.is_main:
        prefix = model.backbone.base_model_prefix
        names = {"backbone": prefix, "head": "score"}
        renamed = {}
        for name, tensor in merge_state(model, state).items():
            part, _, rest = name.partition(".")
            if part in names:
                renamed[f"{names[part]}.{rest}"] = tensor
        with atomic_directory(directory) as temporary:
            save_torch_state_dict(renamed, temporary)
            _classifier_config(model.backbone, tokenizer).save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            atomic_write_json(temporary / REWARD_FILE, asdict(facts))
            if has_adapters(model):
                trunk = {k.removeprefix("backbone."): v for k, v in state.items()}
                save_adapter(
                    model.backbone,
                    trunk,
                    temporary / ADAPTER,
                    prefix=f"{prefix}.",
                    task_type="SEQ_CLS",
                    modules_to_save={"score.weight": renamed["score.weight"]},
                )
    dist.barrier()


def _classifier_config(backbone: Any, tokenizer: Any) -> Any:
    """The trunk's config, as that of a sequence classifier with one label."""
    import copy

    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES,
    )

    config = copy.deepcopy(backbone.config)
    config.architectures = [CLASSES.get(config.model_type, type(backbone).__name__)]
    config.num_labels = 1
    config.use_cache = True
    config.dtype = backbone.dtype
    # Classifiers find the last token of a row by the padding id.
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    return config


def _load_backbone(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str,
    trust_remote_code: bool,
    gradient_checkpointing: bool,
    setting: str,
) -> Any:
    from transformers import AutoModel

    backbone = load_pretrained(
        AutoModel,
        path,
        load_config(path, trust_remote_code=trust_remote_code, setting=setting),
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        setting=setting,
    )
    return prepare_for_training(backbone, device, gradient_checkpointing)


def _read_tensors(path: str, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Reads single tensors from a checkpoint's safetensors files; absent ones are left out."""
    from safetensors import safe_open

    directory = Path(path)
    if not directory.exists():
        from huggingface_hub import snapshot_download

        # `from_pretrained` has just put these into the Hub's cache.
        directory = Path(snapshot_download(path, allow_patterns="*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in set(names) & set(tensors.keys()):
                found[name] = tensors.get_tensor(name)
    return found
