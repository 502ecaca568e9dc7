"""Loading causal language models, with errors that name the setting and the fix."""

from __future__ import annotations

import copy
import json
import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlhf_app.config.schema import Dtype
from rlhf_app.errors import ConfigError
from rlhf_app.home import expanded
from rlhf_app.hybrid_engine.fused.joined import join_storage
from rlhf_app.models.dropout import disable_dropout_in_config, disable_dropout_in_modules
from rlhf_app.models.gguf_files import SUFFIX, check_gguf, gguf_file, pretrained_place
from rlhf_app.models.hub_names import is_local_path
from rlhf_app.models.hub_reach import use_cache_if_unreachable
from rlhf_app.models.weight_index import check_weight_index
from rlhf_app.training.error_phase import within
from rlhf_app.training.safe_load import force_safe_loading, refused_files

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_dtype(name: Dtype, device: torch.device) -> torch.dtype:
    """The torch dtype of a setting: auto is bf16 on CUDA and fp32 on CPU.

    Raises:
        ConfigError: fp16 on CPU, or bf16 on a GPU without it.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "fp16" and device.type == "cpu":
        raise ConfigError("model.dtype fp16 needs a GPU: use auto, fp32 or bf16")
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("model.dtype bf16: this GPU has none; use fp16 or fp32")
    return _DTYPES[name]


def load_config(path: str, *, trust_remote_code: bool = False, setting: str = "model.actor") -> Any:
    """Loads a model's config with dropout 0.

    Args:
        path: directory, Hub id or GGUF file.
        trust_remote_code: run code that the model brings.
        setting: the setting that named the path, for error messages.

    Raises:
        ConfigError: the path or Hub id cannot be read.
    """
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    # Bars of loading and saving weights would fill the log files of the workers.
    disable_progress_bar()
    check_model_path(path, setting)
    place, arguments = pretrained_place(path)
    if not is_local_path(path):
        use_cache_if_unreachable()
    with load_errors(path, setting):
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **arguments)
    disable_dropout_in_config(config)
    return config


@within("load")
def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    setting: str = "model.actor",
) -> Any:
    """Loads a causal LM for training: dropout 0, no KV cache in the forward.

    Args:
        path: directory, Hub id or GGUF file.
        dtype: of the parameters.
        device: where they go.
        attn_implementation: of the training forward.
        trust_remote_code: run code that the model brings.
        gradient_checkpointing: recompute activations in the backward.
        setting: the setting that named the path, for error messages.

    Returns:
        A Hugging Face model in train mode.

    Raises:
        ConfigError: no such directory, no weights, weights missing, Hub not reachable.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(path, trust_remote_code=trust_remote_code, setting=setting)
    model = load_pretrained(
        AutoModelForCausalLM,
        path,
        config,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        setting=setting,
    )
    return prepare_for_training(model, device, gradient_checkpointing)


@contextmanager
def _without_report() -> Iterator[None]:
    """No table of weights that were found or not: what is missing is an error of ours, and a
    head that a trunk does not need is no news."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def load_pretrained(
    auto_class: Any,
    path: str,
    config: Any,
    *,
    dtype: torch.dtype,
    attn_implementation: str,
    trust_remote_code: bool,
    setting: str,
) -> Any:
    """`auto_class.from_pretrained`, where weights that were not found are an error.

    A model without sdpa, the default, is loaded with eager attention.

    Raises:
        ConfigError: as `load_causal_lm`.
    """
    force_safe_loading()
    place, where = pretrained_place(path)
    arguments: dict[str, Any] = {**where, **(_unpacked() if where else {})}

    def load(attention: str) -> tuple[Any, dict[str, Any]]:
        model, info = auto_class.from_pretrained(
            place,
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **arguments,
        )
        return model, info

    with load_errors(path, setting), _without_report():
        try:
            model, info = load(attn_implementation)
        except ValueError as error:
            # Raised before any weight is read.
            if attn_implementation != "sdpa" or "scaled_dot_product_attention" not in str(error):
                raise
            _warn_eager(config.model_type)
            model, info = load("eager")
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"{setting} {path}: {len(missing)} weights are not in the checkpoint "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); "
            f"it is no {type(model).__name__} checkpoint"
        )
    return model


def _unpacked() -> dict[str, Any]:
    """Keyword arguments that turn quantised weights into plain ones, whatever is installed.

    Left to itself, transformers may keep them packed, or refuse to save the model.
    """
    import transformers

    # Versions without this class have no other way to load them.
    settings = getattr(transformers, "GgufConfig", None)
    return {} if settings is None else {"quantization_config": settings(dequantize=True)}


@cache
def _warn_eager(model_type: str) -> None:
    """Warns once for each kind of model."""
    log.warning("%s models have no sdpa attention: using eager, which is slower", model_type)


def prepare_for_training(model: Any, device: torch.device, gradient_checkpointing: bool) -> Any:
    """Dropout 0, cache off, checkpointing if wanted, train mode, siblings joined, on the device."""
    disable_dropout_in_modules(model)
    model.config.use_cache = False
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.to(device)
    join_storage(model)
    return model.train()


def model_max_length(config: Any) -> int:
    """Positions that a model has, or a very large number where it has no limit.

    Args:
        config: the model's config. GPT-2's `n_positions` and the like are found under the
            common name that transformers maps to them.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(positions) if positions else 1 << 30


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """The generation config's EOS ids, as a tuple whether it holds none, one or several."""
    return _as_ids(model.generation_config.eos_token_id, model.config)


def generation_eos_ids(
    path: str, config: Any, *, trust_remote_code: bool = False
) -> tuple[int, ...]:
    """EOS ids of a model that is loaded without its language-model head.

    Args:
        path: directory or Hub id, whose generation config is read if it has one; a GGUF file's
            ids are in its config.
        config: the model's config, asked otherwise.
        trust_remote_code: run code that the model brings.
    """
    from transformers import GenerationConfig

    if gguf_file(path) is not None:
        return _as_ids(None, config)
    try:
        ids = GenerationConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code
        ).eos_token_id
    except OSError:
        ids = None
    return _as_ids(ids, config)


def _as_ids(ids: int | list[int] | None, config: Any) -> tuple[int, ...]:
    if ids is None:
        ids = config.get_text_config().eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def check_model_path(path: str, setting: str) -> None:
    """Tells a mistyped directory from a Hub id before anything is downloaded.

    Raises:
        ConfigError: a directory without config.json, a file that is no GGUF file, or a path that
            is not there.
    """
    local = expanded(path)
    if (quantised := gguf_file(path)) is not None:
        check_gguf(quantised, setting)
    elif local.is_dir():
        # Beside whole weights as well: transformers would load it on top, unmerged, and a
        # reference with adapters off would then be another model than the one named here.
        if (local / "adapter_config.json").is_file():
            raise ConfigError(
                f"{setting} {path}: holds a LoRA adapter; merge it into its base "
                "(peft's merge_and_unload) and give the merged model's directory"
            )
        if not (local / "config.json").is_file():
            raise ConfigError(f"{setting} {path}: no config.json in this directory")
        _check_config_file(local / "config.json", f"{setting} {path}")
        check_weight_index(local, f"{setting} {path}")
        weights = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
        if not any(True for pattern in weights for _ in local.glob(pattern)):
            raise ConfigError(f"{setting} {path}: no weights (*.safetensors) in this directory")
    elif local.exists():
        raise ConfigError(f"{setting} {path}: is a file; give the model's directory")
    elif path.lower().endswith(SUFFIX):
        raise ConfigError(f"{setting} {path}: no such file")
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"{setting} {path}: no such directory")


def _check_config_file(file: Path, where: str) -> None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # transformers says what is wrong
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where}: config.json holds a JSON {type(content).__name__}, not an object: "
            "copy the model's own config.json there"
        )


@contextmanager
def load_errors(path: str, setting: str) -> Iterator[None]:
    """Turns loading errors of transformers into one line.

    Raises:
        ConfigError: with the first line of the cause.
    """
    from safetensors import SafetensorError

    try:
        with refused_files(f"{setting} {path}"):
            yield
    except SafetensorError as error:
        raise ConfigError(
            f"{setting} {path}: a weights file (*.safetensors) is truncated or damaged "
            f"({_first_line(error)}): copy or download it again"
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ConfigError(
            f"{setting} {path}: config.json does not match the weights, whose shapes differ "
            "(vocab_size or another size): restore the config.json that belongs to them"
        ) from error
    except (OSError, ValueError, ImportError, IndexError, struct.error) as error:
        if isinstance(error, ConfigError):
            raise
        if gguf_file(path) is not None and not isinstance(error, ImportError):
            raise ConfigError(
                f"{setting} {path}: transformers cannot read this GGUF file "
                f"({_first_line(error)}): download it again if it is damaged; else take one of an "
                "architecture and a quantisation that transformers knows"
            ) from error
        if isinstance(error, IndexError | struct.error):
            raise
        where = "" if expanded(path).exists() else " (neither a directory here nor "
        where += "" if not where else "a model that the Hub would give us)"
        raise ConfigError(f"{setting} {path}{where}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
