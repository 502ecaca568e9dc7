"""Merging of preset, file and flags, and the one-line errors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlhf_app.config.load import (
    DEFAULT_DATA,
    Override,
    load_config,
    load_saved,
    parse_set,
    preset_names,
    read_preset,
    with_values,
)
from rlhf_app.config.yaml_files import dump_config
from rlhf_app.errors import ConfigError

ACTOR = parse_set("model.actor=some/model")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("yaml_text", "sets", "expected"),
    [
        (None, [], 128),  # preset single_gpu
        ("sft: {batch_size: 64}", [], 64),  # file beats preset
        (None, ["sft.batch_size=32"], 32),  # flag beats preset
        ("sft: {batch_size: 64}", ["sft.batch_size=32"], 32),  # flag beats file
        ("sft: {batch_size: 64}", ["sft.batch_size=32", "sft.batch_size=16"], 16),  # last flag
        ("sft:\nreward:", [], 128),  # empty groups set nothing
    ],
)
def test_precedence(tmp_path: Path, yaml_text: str | None, sets: list[str], expected: int) -> None:
    file = write(tmp_path / "run.yaml", yaml_text) if yaml_text else None
    resolved = load_config(
        preset="single_gpu", config_file=file, overrides=[ACTOR, *map(parse_set, sets)]
    )
    assert resolved.config.sft.batch_size == expected


def test_a_layer_replaces_only_what_it_names(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "ppo: {actor: {zero_stage: 3}, kl_coef: 0.5}")
    resolved = load_config(
        preset="single_node", config_file=file, overrides=[ACTOR, parse_set("ppo.kl_coef=0.25")]
    )
    ppo = resolved.config.ppo
    assert (ppo.actor.zero_stage, ppo.critic.zero_stage, ppo.kl_coef) == (3, 2, 0.25)
    assert resolved.origins["ppo.actor.zero_stage"] == str(file)
    assert resolved.origins["ppo.critic.zero_stage"] == "preset single_node"
    assert resolved.origins["ppo.kl_coef"] == "--set"


@pytest.mark.parametrize(
    ("sets", "preset", "embedded"),
    [
        ([], "tiny_cpu", True),
        (["seed=3"], "tiny_cpu", True),
        (["model.actor=some/model"], None, False),
        (["model.actor=some/model", "deployment.type=single_gpu"], "single_gpu", False),
        (["model.actor=some/model", "deployment.type=single_node"], "single_node", False),
        (["model.actor=some/model", "deployment.type=cpu"], None, False),
    ],
)
def test_preset_follows_from_the_arguments(
    sets: list[str], preset: str | None, embedded: bool
) -> None:
    resolved = load_config(overrides=[parse_set(s) for s in sets])
    assert (resolved.preset, resolved.embedded) == (preset, embedded)


def test_evaluation_data_is_not_swapped_for_the_built_in_one() -> None:
    with pytest.raises(ConfigError, match="without a model"):
        load_config(overrides=[parse_set("data.eval=[e.jsonl]")])


def test_a_named_actor_without_data_gets_the_default_data() -> None:
    assert [s.path for s in load_config(overrides=[ACTOR]).config.data.sources] == [DEFAULT_DATA]
    with_own = load_config(overrides=[ACTOR, parse_set("data.ppo=[p.jsonl]")])
    assert with_own.config.data.sources == ()


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [
        ("a.jsonl", "a.jsonl", 1.0),
        ("a.jsonl=2.5", "a.jsonl", 2.5),
        ("dir=x/a.jsonl", "dir=x/a.jsonl", 1.0),
        ("dir=x/a.jsonl=3", "dir=x/a.jsonl", 3.0),
        ("org/set:config=0.5", "org/set:config", 0.5),
    ],
)
def test_short_form_of_a_source(text: str, path: str, weight: float) -> None:
    resolved = load_config(overrides=[ACTOR, Override("data.sources", [text], "--data")])
    (source,) = resolved.config.data.sources
    assert (source.path, source.weight) == (path, weight)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("sft.learning_rate=1e-5", 1e-5),  # YAML 1.1 reads this as text
        ("sft.learning_rate=0.5", 0.5),
        ("sft.learning_rate=1", 1.0),
    ],
)
def test_numbers_in_any_notation(setting: str, expected: float) -> None:
    rate = load_config(overrides=[parse_set(setting)]).config.sft.learning_rate
    assert math.isclose(rate, expected)


@pytest.mark.parametrize("value", ["2,4,4", "[2, 4, 4]"])
def test_split_shares(value: str) -> None:
    assert load_config(overrides=[parse_set(f"data.split={value}")]).config.data.split == (2, 4, 4)


def test_home_is_expanded_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    sets = ["model.actor=~/m", "data.sources=['~/d.jsonl=2']", "output_dir=~/out", "seed=1"]
    config = load_config(overrides=[parse_set(s) for s in sets]).config
    assert config.model.actor == "/home/someone/m"
    assert config.data.sources[0].path == "/home/someone/d.jsonl"
    assert config.output_dir == Path("/home/someone/out")


def test_split_shared() -> None:
    assert load_config(overrides=[parse_set("data.split=shared")]).config.data.split == "shared"


ERRORS = [
    # (argument of --set, parts of the one line)
    ("kl_coef=0.1", ["kl_coef: unknown setting", "--set", "did you mean ppo.kl_coef?"]),
    ("sft.batch_sise=8", ["sft.batch_sise: unknown setting", "did you mean sft.batch_size?"]),
    ("ppo.actor.lerning_rate=1", ["did you mean ppo.actor.learning_rate?"]),
    ("zzz=1", ["zzz: unknown setting (from --set)"]),
    ("sft.batch_size=abc", ["sft.batch_size = 'abc' (from --set)", "expected a valid integer"]),
    ("sft.batch_size=0", ["sft.batch_size = 0", "expected greater than or equal to 1"]),
    ("sft.batch_size=1.5", ["sft.batch_size = 1.5", "expected a valid integer"]),
    ("sft.batch_size=yes", ["sft.batch_size = True", "expected no true or false"]),
    ("ppo.kl_coef=.nan", ["ppo.kl_coef = nan", "finite"]),
    ("ppo.temperature=.inf", ["ppo.temperature = inf", "finite"]),
    ("sft.zero_stage=4", ["sft.zero_stage = 4", "expected 0, 1, 2 or 3"]),
    ("deployment.type=moon", ["deployment.type = 'moon'", "'single_gpu'"]),
    ("data.split=2,4", ["data.split = '2,4'", "three shares such as 2,4,4"]),
    ("data.split=0,0,0", ["data.split", "not all 0"]),
    ("stages=[ppo, sft]", ["stages: name each of sft, reward, ppo at most once"]),
    ("ppo=3", ["ppo = 3 (from --set): expected a group of settings"]),
    ("data.sources=[{path: a, wieght: 2}]", ["data.sources[0].wieght: unknown setting"]),
    ("data.sources=[a=-1]", ["data.sources[0].weight = -1.0", "greater than or equal to 0.000001"]),
    ("data.sources=['~no.such.user/a']", ["~no.such.user/a", "no home directory is known for ~no"]),
    ("data.cache_dir='~no.such.user'", ["data.cache_dir = ", "no home directory is known for ~no"]),
    ("output_dir='~no.such.user/x'", ["output_dir = ", "no home directory is known for ~no.such"]),
    (r'data.sources=["\uDCFF.jsonl"]', [r"path = '\udcff.jsonl'", "a name in UTF-8; rename the"]),
    ("data.sources=[a=1e300]", ["data.sources[0].weight = 1e+300", "less than or equal to"]),
    ("data.sources=[a=1e-300]", ["data.sources[0].weight = 1e-300", "greater than or equal to"]),
    ("data.sources=[{weight: 2}]", ["data.sources[0].path: missing"]),
    ("ppo.kl_coef", ["--set ppo.kl_coef: expected key=value"]),
    ("ppo.kl_coef=[", ["--set ppo.kl_coef=[: the value is not valid YAML"]),
]


@pytest.mark.parametrize(("argument", "parts"), ERRORS)
def test_errors_are_one_line(argument: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[ACTOR, parse_set(argument)])
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sft: {batch_size: -1}", ["sft.batch_size = -1 (from ", "run.yaml)"]),
        ("sft:\n  bach_size: 1", ["sft.bach_size: unknown setting (from ", "sft.batch_size?"]),
        ("sft: {epochs: 1, epochs: 2}", ["run.yaml line 1", "'epochs' is given twice"]),
        ("- 1\n- 2", ["run.yaml: expected settings"]),
        ("sft: [", ["run.yaml line "]),
        ("a: !!python/object/apply:os.getcwd []", ["run.yaml line 1", "could not determine"]),
    ],
)
def test_errors_in_files_name_the_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = write(tmp_path / "run.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(config_file=file, overrides=[ACTOR])
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_several_bad_settings_are_counted() -> None:
    sets = ["sft.batch_size=0", "reward.batch_size=0", "ppo.kl_coef=-1"]
    with pytest.raises(ConfigError, match=r"sft\.batch_size = 0.*\(and 2 more bad settings\)"):
        load_config(overrides=[parse_set(s) for s in sets])


def test_missing_file_and_data_without_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(config_file=tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="--actor-model"):
        load_config(overrides=[parse_set("data.sources=[a.jsonl]")])
    with pytest.raises(ConfigError, match=r"--preset huge: unknown; choose one of .*tiny_cpu"):
        load_config(preset="huge")


def test_saved_settings_read_back_exactly(tmp_path: Path) -> None:
    sets = ["sft.learning_rate=3.3333333333333335e-05", "data.sources=[a=0.1, b]", "seed=7"]
    config = load_config(overrides=[ACTOR, *map(parse_set, sets)]).config
    file = write(tmp_path / "config.yaml", dump_config(config))
    assert load_saved(file) == config
    assert load_config(config_file=file).config == config


def test_with_values_validates() -> None:
    config = load_config().config
    assert with_values(config, {"model.actor": "x"}).model.actor == "x"
    assert config.model.actor is None
    with pytest.raises(ConfigError, match=r"sft\.batch_size"):
        with_values(config, {"sft.batch_size": 0})


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid(name: str) -> None:
    settings = read_preset(name)
    assert settings
    load_config(preset=name, overrides=[ACTOR])


def test_presets_by_name() -> None:
    assert preset_names() == ("single_gpu", "single_node", "tiny_cpu")


BROKEN = [
    ("? [1, 2]\n: 3", "a key is a list"),
    ("sft: " + "[" * 5000, "nested too deeply"),
    ("seed: 2024-99-99", "not valid YAML"),
    ('output_dir: "a\\0b"', "null character"),
    ("sft: [&a [l, l], &b [*a, *a]]", "anchors and aliases"),
    ("seed: &a 1", "anchors and aliases"),
    ("model: {actor: ''}", "not an empty one"),
    ("data: {sft: ['']}", "not an empty one"),
    ("output_dir: ''", "not an empty one"),
    (f"model: {{actor: {'x' * 300}}}", "too long"),
    (f"data: {{sources: [{'x' * 300}]}}", "too long"),
    (f"output_dir: {'x' * 300}", "too long"),
    ("seed: 99999999999999999999999999", "less than or equal to 2147483647"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_hostile_files_end_in_one_short_line(tmp_path: Path, text: str, message: str) -> None:
    actor = [] if "model" in text else [ACTOR]
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(config_file=write(tmp_path / "run.yaml", text), overrides=actor)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "argument", ["seed=2024-99-99", "seed=&a 1", "sft.epochs=" + "[" * 5000, "seed={? [1]: 2}"]
)
def test_hostile_values_of_set(argument: str) -> None:
    with pytest.raises(ConfigError, match="not valid YAML; quote it") as caught:
        parse_set(argument)
    assert len(str(caught.value)) < 300
