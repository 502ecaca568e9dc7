"""Whatever stands in a settings file or behind --set: a valid configuration or one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlhf_app.config.keys import all_fields, setting_keys
from rlhf_app.config.load import Override, load_config, load_saved, parse_set
from rlhf_app.config.schema import RunConfig
from rlhf_app.config.yaml_files import dump_config
from rlhf_app.errors import ConfigError

FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ACTOR = Override("model.actor", "org/m", "--actor-model")
WORDS = (
    *("cpu", "auto", "true", "none", "shared", "all-linear", "model", "gae", "rloo", "bf16", "~"),
    *("~nobody-of-this-name/x", "a=1", "a.jsonl=0.5", "http://h/s", "m.py:f", "1e-5", "2,4,4"),
    *("", " ", "\0", "\ud800", "\u2028", "x" * 300, "[", "{", "no", "0x10", "1_000", "12:30:45"),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, -(2**70), 10**400]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(WORDS),
    st.dates(),
    st.datetimes(),
    st.binary(max_size=4),
)
# Every part of a setting's dotted name, and a few that are none.
PARTS = sorted({part for key in all_fields() for part in key.split(".")})
OTHERS = ("path", "weight", "function", "http", "classifier", "timeout", "kl", "", "a.b")
NAMES = st.sampled_from([*PARTS, *OTHERS])
KEYS = st.one_of(NAMES, NAMES, st.text(max_size=6), st.integers(-1, 3), st.none())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(st.text(max_size=3), max_size=2),
    ),
    max_leaves=5,
)


@st.composite
def trees(draw: st.DrawFn) -> dict[object, object]:
    """Settings of the schema with any values, and things that no schema has beside them."""
    tree: dict[object, Any] = {}
    for key in draw(st.lists(st.sampled_from(list(all_fields())), max_size=4)):
        *groups, name = key.split(".")
        place: Any = tree
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):
                break
        else:
            place[name] = draw(VALUES)
    if draw(st.integers(0, 4)) == 0:
        tree[draw(KEYS)] = draw(VALUES)
    return tree


def outcome(load: Callable[[], RunConfig], file: Path) -> RunConfig | None:
    """The configuration, which survives being saved, or None after an error of one short line."""
    try:
        config = load()
    except ConfigError as error:
        message = str(error)
        assert message
        assert len(message.splitlines()) == 1, message
        assert len(message) < 700
        return None
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_saved(file) == config
    return config


@FUZZ
@given(trees())
@example({"\r": None})
def test_any_tree_in_a_file(tmp_path, tree):
    text = yaml.dump(tree, allow_unicode=True, Dumper=NoAliases)
    file = tmp_path / "run.yaml"
    file.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    for overrides in ([], [ACTOR]):
        outcome(
            lambda given=overrides: load_config(config_file=file, overrides=given).config,
            tmp_path / "config.yaml",
        )


class NoAliases(yaml.SafeDumper):
    """A value that occurs twice is written twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


@FUZZ
@given(st.dictionaries(st.sampled_from(setting_keys()), VALUES, max_size=4))
@example({"data.split": [10**400, 1, 1]})
def test_any_values_of_settings(tmp_path, values):
    """As Python objects, past YAML: what a flag's own parser may hand over."""
    overrides = [ACTOR, *(Override(key, value, "--flag") for key, value in values.items())]
    outcome(lambda: load_config(overrides=overrides).config, tmp_path / "config.yaml")


PUNCTUATION = st.text("{}[]:,&*!|>'\"%@`#?-\n\t\\ ~=.0123456789eE_abnul\0\ud800\x85", max_size=24)


@FUZZ
@given(
    st.one_of(st.text(max_size=16), st.sampled_from([*setting_keys(), *all_fields()])),
    st.one_of(PUNCTUATION, st.text(max_size=12), st.sampled_from(WORDS)),
)
@example("0", "{0\x85")
@example("seed\n\x1b[2J", "1")
def test_any_argument_of_set(tmp_path, key, value):
    def load() -> RunConfig:
        return load_config(overrides=[ACTOR, parse_set(f"{key}={value}")]).config

    outcome(load, tmp_path / "config.yaml")


@FUZZ
@given(st.one_of(PUNCTUATION, st.text(max_size=60), st.binary(max_size=60)))
def test_any_bytes_in_a_file(tmp_path, content):
    file = tmp_path / "run.yaml"
    if isinstance(content, str):
        content = content.encode("utf-8", errors="surrogatepass")
    file.write_bytes(content)
    outcome(lambda: load_config(config_file=file).config, tmp_path / "config.yaml")
