"""Merges preset, YAML file and flags into one validated `RunConfig`.

Precedence: preset < YAML file < `--set` and the other flags, in the order given. Every value
remembers where it came from, so that an error can say so.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from rlhf_app.config.hidden import put_hidden_back, refuse_hidden
from rlhf_app.config.keys import all_fields, did_you_mean, flatten, section_type
from rlhf_app.config.problems import describe
from rlhf_app.config.schema import RunConfig
from rlhf_app.config.yaml_files import parse_value, parse_yaml, read_mapping
from rlhf_app.errors import ConfigError

DEFAULT_DATA = "Dahoas/rm-static"
_DATA_KEYS = ("data.sources", "data.sft", "data.reward", "data.ppo")


@dataclass(frozen=True, slots=True)
class Override:
    """One setting given on the command line.

    Attributes:
        key: dotted name.
        value: as parsed; pydantic converts it.
        origin: the flag, for error messages.
    """

    key: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A finished configuration and its history.

    Attributes:
        config: the validated settings.
        origins: dotted setting -> preset, file or flag that set it; absent: schema default.
        preset: the preset used, or None.
        embedded: whether the run uses the built-in model and task.
    """

    config: RunConfig
    origins: dict[str, str]
    preset: str | None
    embedded: bool


def preset_names() -> tuple[str, ...]:
    """The presets that come with the package."""
    folder = resources.files("rlhf_app.config") / "presets"
    return tuple(
        sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
    )


def read_preset(name: str) -> dict[str, object]:
    """The settings of a preset.

    Raises:
        ConfigError: no preset has this name.
    """
    if name not in preset_names():
        raise ConfigError(f"--preset {name}: unknown; choose one of {', '.join(preset_names())}")
    text = (resources.files("rlhf_app.config") / "presets" / f"{name}.yaml").read_text("utf-8")
    return parse_yaml(text, f"preset {name}")


def parse_set(argument: str) -> Override:
    """Parse one `--set key=value`; the value is YAML, so lists and null work.

    Raises:
        ConfigError: no equals sign, or the value is not YAML.
    """
    key, equals, text = argument.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set {_short(argument)}: expected key=value, for example ppo.kl_coef=0.05"
        )
    try:
        value = parse_value(text, "")
    except ConfigError as error:
        reason = str(error).rpartition(": ")[2]
        raise ConfigError(
            f"--set {_short(argument)}: the value is not valid YAML; quote it ({reason})"
        ) from None
    return Override(key.strip(), value, "--set")


def load_config(
    *,
    preset: str | None = None,
    config_file: Path | None = None,
    overrides: Sequence[Override] = (),
) -> Resolved:
    """Merge and validate the settings of a run.

    Without an actor model and without data the embedded default runs, with the preset
    `tiny_cpu`. With an actor and no data, the data is `Dahoas/rm-static`, as in
    DeepSpeed-Chat. Without `preset`, a deployment type that has a preset of its own name
    selects it.

    Args:
        preset: name of a preset, or None to choose as above.
        config_file: YAML file with settings, or None.
        overrides: flags; a later one wins.

    Raises:
        ConfigError: an unknown setting, a bad value, or a file that cannot be read.
    """
    given = _given(config_file, overrides)
    actor = given.values.get("model.actor")
    has_data = any(given.values.get(key) for key in _DATA_KEYS)
    embedded = actor is None and not has_data
    if actor is None and has_data:
        raise ConfigError("model.actor is unset: name the base model with --actor-model")
    if embedded and given.values.get("data.eval"):
        raise ConfigError(
            "--eval-data (data.eval) without a model: the built-in task has evaluation data of its "
            "own; name the base model with --actor-model, or leave --eval-data out"
        )
    deployment = given.values.get("deployment.type")
    if preset is None:
        preset = "tiny_cpu" if embedded else None
        if not embedded and isinstance(deployment, str) and deployment in preset_names():
            preset = deployment

    layers = _Layers()
    if preset is not None:
        layers.add(read_preset(preset), f"preset {preset}")
    if not embedded and not has_data:
        layers.add(_nest("data.sources", [DEFAULT_DATA]), "the default")
    layers.extend(given)
    return Resolved(validate(layers.values, layers.origins), layers.origins, preset, embedded)


def load_given(config_file: Path | None, overrides: Sequence[Override]) -> RunConfig:
    """Validate what a file and flags say, without the presets and defaults of a run.

    Args:
        config_file: YAML file with settings, or None.
        overrides: flags; a later one wins.

    Raises:
        ConfigError: an unknown setting, a bad value, or a file that cannot be read.
    """
    layers = _given(config_file, overrides)
    return validate(layers.values, layers.origins)


def load_saved(path: Path) -> RunConfig:
    """Read a `config.yaml` that a run directory holds, with what the controller left out of it.

    Raises:
        ConfigError: it is missing, unreadable or was changed by hand to something invalid.
    """
    layers = _Layers()
    saved = read_mapping(path)
    put_hidden_back(saved)
    layers.add(saved, str(path))
    return validate(layers.values, layers.origins)


def validate(values: Mapping[str, object], origins: Mapping[str, str]) -> RunConfig:
    """Build the frozen settings from dotted values.

    Raises:
        ConfigError: a value does not fit its setting.
    """
    refuse_hidden(values, origins)
    nested: dict[str, object] = {}
    for key, value in values.items():
        _merge(nested, _nest(key, value))
    for key, value in values.items():
        _refuse_bool_as_number(key, value, origins.get(key, ""))
    try:
        return RunConfig.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(describe(error, origins)) from None


def with_values(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    """A copy of `config` with some dotted settings replaced, validated again."""
    values = flatten(config.model_dump(mode="json")) | dict(changes)
    return validate(values, {})


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "..."


class _Layers:
    """Dotted values and their origins; a later layer replaces earlier values."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.origins: dict[str, str] = {}

    def add(self, nested: Mapping[str, object], origin: str) -> None:
        for key, value in self._leaves(nested, "", origin):
            self.values[key] = value
            self.origins[key] = origin

    def extend(self, other: _Layers) -> None:
        self.values.update(other.values)
        self.origins.update(other.origins)

    def _leaves(
        self, nested: Mapping[str, object], prefix: str, origin: str
    ) -> Iterable[tuple[str, object]]:
        """Walk one layer down to its settings; the schema says what is a group."""
        fields = all_fields()
        for name, value in nested.items():
            key = f"{prefix}{name}"
            if key not in fields:
                raise ConfigError(f"{key}: unknown setting (from {origin}){did_you_mean(key)}")
            if section_type(fields[key]) is None:
                yield key, value
            elif isinstance(value, Mapping):
                yield from self._leaves(value, f"{key}.", origin)
            elif value is not None:  # an empty group in YAML is None and means nothing set
                raise ConfigError(
                    f"{key} = {reprlib.repr(value)} (from {origin}): expected a group of settings"
                )


def _given(config_file: Path | None, overrides: Sequence[Override]) -> _Layers:
    layers = _Layers()
    if config_file is not None:
        layers.add(read_mapping(config_file), str(config_file))
    for override in overrides:
        layers.add(_nest(override.key, override.value), override.origin)
    return layers


def _nest(key: str, value: object) -> dict[str, object]:
    head, dot, tail = key.partition(".")
    return {head: _nest(tail, value) if dot else value}


def _merge(into: dict[str, object], new: Mapping[str, object]) -> None:
    for name, value in new.items():
        old = into.get(name)
        if isinstance(old, dict) and isinstance(value, Mapping):
            _merge(old, value)
        else:
            into[name] = value


def _refuse_bool_as_number(key: str, value: object, origin: str) -> None:
    """YAML reads yes/no/on/off as booleans, which pydantic would take as 1 and 0."""
    if not isinstance(value, bool):
        return
    if "bool" not in str(all_fields()[key].annotation):
        raise ConfigError(f"{key} = {value} (from {origin or 'code'}): expected no true or false")
