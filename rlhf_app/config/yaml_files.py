"""Reads and writes YAML safely: plain values only, no duplicate keys, no lost precision."""

from __future__ import annotations

from pathlib import Path

import yaml

from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which would otherwise let the second of two equal keys win."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[object, object]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is given twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, origin: str) -> dict[str, object]:
    """Parse settings; an empty text is an empty mapping.

    Raises:
        ConfigError: invalid YAML, a duplicate key, or something else than a mapping.
    """
    try:
        # _StrictLoader only adds a check to SafeLoader: no Python objects can be built.
        values = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError(f"{origin}{line}: {problem}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{origin}: expected settings such as 'seed: 1'")
    return values


def read_mapping(path: Path) -> dict[str, object]:
    """Read a YAML file of settings.

    Raises:
        ConfigError: missing, unreadable, not UTF-8 or not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    return parse_yaml(text, str(path))


def dump_config(config: RunConfig) -> str:
    """All settings as YAML, in schema order; `load_saved` reads the same values back."""
    return yaml.safe_dump(
        config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100
    )
