"""Models in llama.cpp's GGUF format: one file with weights, config, tokenizer and chat template.

transformers reads such a file (`gguf_file=`) and undoes its quantisation, so that what is trained
is an ordinary model, and what a stage leaves behind an ordinary safetensors directory. This
module finds the file behind a model's name and says what its header tells of the shape. No torch:
dry runs use it.
"""

from __future__ import annotations

import importlib.util
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_app.errors import ConfigError
from rlhf_app.home import expanded

SUFFIX = ".gguf"
_MAGIC = b"GGUF"

# Where a directory has these, its GGUF files are copies for other programs.
_USUAL_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")

# Architectures whose config `models/shapes.py` knows, by the name in the header.
_KINDS = ("llama", "qwen2", "qwen3")


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a model's name stands for.

    Args:
        name: path of such a file, or of a directory with one of them and no other weights;
            else any directory or Hub id.

    Returns:
        None where the name stands for something else.

    Raises:
        ConfigError: a directory holds several such files and no other weights.
    """
    path = expanded(name)
    if path.suffix.lower() == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or any(next(path.glob(w), None) for w in _USUAL_WEIGHTS):
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise ConfigError(
            f"{name}: holds {len(files)} GGUF files; name one of them, for example {files[0]}"
        )
    return files[0] if files else None


def pretrained_place(name: str) -> tuple[str, dict[str, str]]:
    """How to name a model to transformers' `from_pretrained`.

    Args:
        name: directory, Hub id or GGUF file.

    Returns:
        The first argument and further keyword arguments.
    """
    file = gguf_file(name)
    # Whole, because transformers prefers a file of the same name in the working directory.
    return (name, {}) if file is None else (str(file.parent), {"gguf_file": str(file.absolute())})


def check_gguf(file: Path, setting: str) -> None:
    """Refuses what cannot be read, before any worker starts.

    Args:
        file: an existing file.
        setting: the flag or setting that named it.

    Raises:
        ConfigError: the file is no GGUF file, or the package `gguf` is absent.
    """
    with file.open("rb") as opened:
        start = opened.read(4)
    if start != _MAGIC:
        raise ConfigError(
            f"{setting} {file}: is no GGUF file (it does not start with GGUF); download it again"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"{setting} {file}: reading GGUF files needs a package that is not installed: "
            "pip install 'gguf>=0.10'"
        )


def gguf_config(file: Path) -> dict[str, Any] | None:
    """The header in the words of a Hugging Face `config.json`, as far as shapes need it.

    Args:
        file: an existing GGUF file.

    Returns:
        None without the package `gguf`, and for a file or an architecture that cannot be read.
    """
    status = file.stat()
    return _gguf_config(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)  # reading a vocabulary takes a second
def _gguf_config(file: Path, changed: int, size: int) -> dict[str, Any] | None:
    try:
        from gguf import GGUFReader
    except ImportError:
        return None
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, OSError, struct.error):
        return None  # loading says what is wrong

    def value(key: str) -> Any:
        found = reader.get_field(key)
        return None if found is None else found.contents()

    kind = value("general.architecture")
    if kind not in _KINDS:
        return None
    tokens = reader.get_field("tokenizer.ggml.tokens")
    names = {tensor.name for tensor in reader.tensors}
    config = {
        "model_type": kind,
        "hidden_size": value(f"{kind}.embedding_length"),
        "num_hidden_layers": value(f"{kind}.block_count"),
        "num_attention_heads": value(f"{kind}.attention.head_count"),
        "num_key_value_heads": value(f"{kind}.attention.head_count_kv"),
        "head_dim": value(f"{kind}.attention.key_length"),
        "intermediate_size": value(f"{kind}.feed_forward_length"),
        "max_position_embeddings": value(f"{kind}.context_length"),
        "vocab_size": value(f"{kind}.vocab_size") or (len(tokens.data) if tokens else None),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in names,
    }
    return {key: content for key, content in config.items() if content is not None}
