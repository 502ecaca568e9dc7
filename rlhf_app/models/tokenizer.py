"""Loading tokenizers, and naming them by what they do to text."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rlhf_app.errors import ConfigError
from rlhf_app.home import expanded
from rlhf_app.models.gguf_files import pretrained_place
from rlhf_app.models.hub_reach import use_cache_if_unreachable

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Loads a tokenizer from a directory, a GGUF file or the Hub.

    A tokenizer without a pad token gets EOS as pad, without new embeddings: nothing in this
    project derives a mask from pad ids, so sharing the id is harmless.

    Args:
        path: directory, GGUF file, or Hub id.
        trust_remote_code: run Python code shipped beside the tokenizer.

    Raises:
        ConfigError: no such directory, no tokenizer in it, no such model on the Hub, or the
            Hub cannot be reached.
    """
    from transformers import AutoTokenizer

    directory = expanded(path)
    is_local = directory.exists()
    place, arguments = pretrained_place(str(directory) if is_local else path)
    if is_local and not arguments and not directory.is_dir():
        raise ConfigError(f"model {path} is a file; give the directory that holds the model")
    if (
        is_local
        and not arguments
        and not any((directory / name).exists() for name in _TOKENIZER_FILES)
    ):
        raise ConfigError(
            f"model directory {path} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); "
            "save the tokenizer beside the model with tokenizer.save_pretrained"
        )
    if not is_local and _only_a_path(path):
        raise ConfigError(f"model directory {path} does not exist; check --actor-model and cwd")
    if not is_local:
        use_cache_if_unreachable()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code, **arguments
        )
    except Exception as error:
        raise ConfigError(_why(path, is_local, error)) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def padding_id(tokenizer: Any) -> int:
    """Id that fills up rows: the tokenizer's, or 0 where it has neither padding nor EOS token.

    Any id of the vocabulary does, as no mask comes from padding ids.
    """
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def _only_a_path(path: str) -> bool:
    """Whether the name cannot be a Hub id (`name` or `owner/name`)."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith("/")


def _why(path: str, is_local: bool, error: Exception) -> str:
    """One line that tells a broken directory, an unknown Hub id and a missing network apart."""
    first = (str(error).strip().splitlines() or [""])[0]
    if is_local:
        return f"tokenizer in {path} cannot be read ({type(error).__name__}: {first})"
    names = set()
    cause: BaseException | None = error
    while cause is not None:
        names.add(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    if names & {"RepositoryNotFoundError", "HFValidationError"}:
        return f"model {path} is neither a directory here nor a model on the Hugging Face Hub"
    if names & {"GatedRepoError"}:
        return f"model {path} is gated on the Hub; accept its licence and run `hf auth login`"
    unreachable = {
        "LocalEntryNotFoundError",
        "OfflineModeIsEnabled",
        "ConnectionError",
        "ConnectError",
        "ConnectTimeout",
        "ReadTimeout",
        "Timeout",
        "MaxRetryError",
    }
    if names & unreachable or "connect" in str(error).lower():
        return (
            f"model {path}: no such directory here, and the Hugging Face Hub cannot be reached; "
            "give a local directory, or check the network and HF_HUB_OFFLINE"
        )
    return f"tokenizer of {path} cannot be loaded ({type(error).__name__}: {first})"


def tokenizer_hash(tokenizer: Any) -> str:
    """Returns 16 hex digits that are equal exactly for tokenizers that map text to equal ids.

    Hashes vocabulary, merges, normalisation, pre-tokenisation and added tokens; not the chat
    template, the pad token, or the padding and truncation that the last call left behind. A
    saved and reloaded tokenizer keeps its hash.
    """
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        added = sorted(
            (token["id"], token["content"], token["lstrip"], token["rstrip"], token["normalized"])
            for token in state["added_tokens"]
        )
        content: Any = [state["model"], state["normalizer"], state["pre_tokenizer"], added]
    else:
        content = [type(tokenizer).__name__, tokenizer.get_vocab()]
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode("ascii"), digest_size=8).hexdigest()
