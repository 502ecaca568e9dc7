"""DeepSpeed's config, split into what DeepSpeed reads and the `hybrid_engine` block."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError

KEY = "hybrid_engine"


def split_config(args: Any, config: Any) -> tuple[dict[str, Any], HybridEngineSettings]:
    """Read the config and take the `hybrid_engine` block out of it.

    Args:
        args: the caller's argument object or None; `deepspeed_config` on it names a file.
        config: dict, path of a JSON file, base64 of JSON, or None.

    Returns:
        The config for DeepSpeed (a copy without the block) and our settings.

    Raises:
        ConfigError: no config, two configs, an unreadable one, or a bad block.
    """
    for name in ("deepspeed_config", "deepscale_config"):
        named = getattr(args, name, None)
        if named is None:
            continue
        if config is not None:
            raise ConfigError(f"both config= and args.{name} are given: pass one of them")
        config = named
    if config is None:
        raise ConfigError("no DeepSpeed config: pass config= or --deepspeed_config FILE")
    if not isinstance(config, dict | str | os.PathLike) or config == "":
        raise ConfigError(f"config is {config!r}: give a dict, a JSON file or base64 of JSON")
    ds_config = dict(config) if isinstance(config, dict) else _read(str(config))
    return ds_config, parse_block(ds_config.pop(KEY, None))


def parse_block(block: Any) -> HybridEngineSettings:
    """Check a `hybrid_engine` block.

    Args:
        block: the mapping, or None when the config has no block.

    Raises:
        ConfigError: naming the first bad key.
    """
    if block is None:
        return HybridEngineSettings()
    if not isinstance(block, dict) or not all(isinstance(key, str) for key in block):
        raise ConfigError(f"{KEY} is {block!r}: give a mapping such as {{'enabled': true}}")
    try:
        return HybridEngineSettings(**block)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in (KEY, *first["loc"]))
        known = ", ".join(HybridEngineSettings.model_fields)
        raise ConfigError(f"{key}: {first['msg']} (keys: {known})") from error


def _read(config: str) -> dict[str, Any]:
    # DeepSpeed reads its files with hjson (comments, trailing commas): so must we.
    import hjson  # type: ignore[import-untyped]

    looks_like_file = config.endswith((".json", ".hjson")) or os.sep in config
    if looks_like_file and not os.path.exists(config):
        raise ConfigError(f"config {config!r}: no such file")
    try:
        # os.path: Path.exists raises where base64 is too long for a file name.
        is_file = os.path.exists(config)
        text = Path(config).read_text() if is_file else base64.urlsafe_b64decode(config).decode()
        loaded = hjson.loads(text, object_pairs_hook=_no_duplicates)
    except (OSError, ValueError) as error:  # bad base64, bad UTF-8 and bad JSON are ValueErrors
        raise ConfigError(
            f"config {config!r} is neither a JSON file nor base64 of JSON: {error}"
        ) from error
    if not isinstance(loaded, dict) or not text.strip():
        raise ConfigError(f"config {config!r} holds no JSON object")
    return loaded


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict; a key given twice is an error, as it is in DeepSpeed."""
    built = dict(pairs)
    if len(built) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"duplicate keys {', '.join(twice)}")
    return built
