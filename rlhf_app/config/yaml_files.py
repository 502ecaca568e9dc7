"""Reads and writes YAML safely: plain values only, no duplicate keys, no lost precision."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

import yaml

from rlhf_app.config.hidden import shown_values
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which would otherwise let the second of two equal keys win.

    Aliases are refused: a few lines of them can stand for billions of values.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            raise yaml.composer.ComposerError(
                None, None, "anchors and aliases (& and *) are not supported", event.start_mark
            )
        return super().compose_node(parent, index)


class _PlainDumper(yaml.SafeDumper):
    """Writes a value that occurs twice out twice, since aliases are not read back."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[object, object]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(
                None, None, "a key is a list or a group; expected a name", key_node.start_mark
            )
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {reprlib.repr(key)} is given twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_value(text: str, origin: str) -> Any:
    """Parse any YAML value.

    Raises:
        ConfigError: invalid YAML, a duplicate key, an alias, or nested too deeply.
    """
    try:
        # _StrictLoader only adds checks to SafeLoader: no Python objects can be built.
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader with more checks
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError(f"{origin}{line}: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply") from None
    except (TypeError, ValueError) as error:  # such as a date that no calendar has
        raise ConfigError(f"{origin}: not valid YAML: {error}") from None


def parse_yaml(text: str, origin: str) -> dict[str, object]:
    """Parse settings; an empty text is an empty mapping.

    Raises:
        ConfigError: invalid YAML, a duplicate key, or something else than a mapping.
    """
    values = parse_value(text, origin)
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
    """All settings as YAML, in schema order; `load_saved` reads the same values back.

    Passwords are left out; `hidden_settings` tells them to the process that reads it.
    """
    text: str = yaml.dump(
        shown_values(config),
        Dumper=_PlainDumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
    return text
