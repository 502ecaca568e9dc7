"""The list of reward sources: short and long forms, one-line errors, names, no secrets shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_app.config.load import load_config, parse_set, validate, with_values
from rlhf_app.config.rewards import RewardSource, rewards_without_effect, source_names, uses_model
from rlhf_app.config.schema import PPOConfig, RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.url_secrets import without_secrets


def sources(text: str) -> tuple[RewardSource, ...]:
    return load_config(overrides=[parse_set(f"ppo.rewards={text}")]).config.ppo.rewards


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model", [{"model": True}]),
        ("[model=2]", [{"model": True, "weight": 2.0}]),
        ("my.py:score", [{"function": "my.py:score"}]),
        ("dir/my.py:score=-0.5", [{"function": "dir/my.py:score", "weight": -0.5}]),
        ("pkg.module:object.method", [{"function": "pkg.module:object.method"}]),
        ("http://h:5/score?k=0.5", [{"http": "http://h:5/score?k=0.5"}]),  # no weight in there
        ("http://h:5/score=0.5", [{"http": "http://h:5/score", "weight": 0.5}]),
        ("http://h:5/a=b", [{"http": "http://h:5/a=b"}]),
        ("owner/model", [{"classifier": "owner/model"}]),
        ("./model", [{"classifier": "./model"}]),
        ("./a=b", [{"classifier": "./a=b"}]),
        (
            "[model, {function: 'm:f', weight: 0.5, mean: 1, std: 2, clip: 3}]",
            [
                {"model": True},
                {"function": "m:f", "weight": 0.5, "mean": 1.0, "std": 2.0, "clip": 3.0},
            ],
        ),
        ("[{classifier: a/b, label: good}]", [{"classifier": "a/b", "label": "good"}]),
        ("{http: 'https://h/x', timeout: 1, retries: 0}", [
            {"http": "https://h/x", "timeout": 1.0, "retries": 0}
        ]),
    ],
)  # fmt: skip
def test_forms_are_saved_as_short_as_they_were_written(text: str, expected: list[object]) -> None:
    found = sources(text)
    assert [source.model_dump(mode="json") for source in found] == expected
    # What a run directory stores is read back as the same.
    saved = validate({"ppo.rewards": expected}, {}).ppo.rewards
    assert saved == found
    config = with_values(RunConfig(), {"ppo.rewards": expected})
    assert with_values(config, {"seed": 1}).ppo.rewards == found


def test_the_default_is_the_model_of_stage_2_alone() -> None:
    assert PPOConfig().rewards == (RewardSource(model=True),)
    assert uses_model(PPOConfig().rewards)
    assert not uses_model(sources("m:f"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected at least one source"),
        ("[model, {model: true, weight: 2}]", "named twice"),
        ("[{weight: 2}]", "name exactly one of model: true, classifier, function and http"),
        ("[{function: 'm:f', http: 'http://h'}]", "not function and http"),
        ("[{function: 'm:f', weight: 0}]", "weight 0 has no effect"),
        ("[{function: 'm:f', label: 1}]", "label is a setting of classifier sources"),
        ("[{classifier: a/b, retries: 1}]", "retries is a setting of http sources"),
        ("[{function: my.py}]", "expected module:function or file.py:function"),
        ("[{http: 'ftp://h/x'}]", "expected an address such as http://localhost:5000/score"),
        ("[{http: 'http://h:99999/x'}]", "expected an address"),
        ("[{http: 'http:///x'}]", "expected an address"),
        ("[{http: 'http://h/a b'}]", "write spaces and other special characters as %20"),
        ("[{http: 'http://h/\u00e9'}]", "write spaces and other special characters as %20"),
        ("[{function: 'm:f', std: 0}]", "greater than 0"),
        ("[{function: 'm:f', clip: -1}]", "greater than 0"),
        ("[{function: 'm:f', name: std}]", "name std"),
        ("[{function: 'm:f', name: seconds}]", "name seconds"),
        ("[{function: 'm:f', name: tox_truncated}]", "nor an ending _truncated"),
        ("[{function: 'm:f', name: a}, {function: 'm:g', name: a}]", "same name"),
        ("a:b:c", "expected model, module:function, file.py:function"),
        ("[{functoin: 'm:f'}]", "unknown setting"),
    ],
)  # fmt: skip
def test_errors_are_one_line_that_names_the_setting(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sources(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("ppo.rewards")
    assert "\n" not in str(caught.value)


def test_names_tell_sources_apart_and_from_other_metrics() -> None:
    found = sources(
        "[model, a.py:score, b.py:score, m:obj.std, dir/tox-bert, http://h.example:5/x, "
        "{function: 'm:f', name: score_2}, m:seconds, m:tox_bert_truncated]"
    )
    assert source_names(found) == [
        "model", "score", "score_3", "std_2", "tox_bert", "h_example", "score_2", "seconds_2",
        "tox_bert_truncated_2",
    ]  # fmt: skip


def test_no_source_may_be_called_like_a_metric_that_is_documented(repo_root: Path) -> None:
    page = (repo_root / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`reward_(\w+)`", page))
    assert {"std", "length_correlation", "seconds"} <= documented
    for name in documented:
        with pytest.raises(ConfigError, match=f"name {name}: expected"):
            sources(f"[{{function: 'm:f', name: {name}}}]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pa@ss@h:5/x", "http://***@h:5/x"),
        ("see https://t0ken@h/x?key=1&b=2 and http://g/y", "see https://***@h/x?*** and http://g/y"),
        ("[{'http': 'http://h/x?key=1', 'a': 1}]", "[{'http': 'http://h/x?***', 'a': 1}]"),
        ("a@b ? c", "a@b ? c"),
    ],
)  # fmt: skip
def test_secrets_of_addresses_are_not_shown(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_no_error_shows_a_password() -> None:
    with pytest.raises(ConfigError) as caught:
        sources("[{http: 'http://user:hidden@h/x?token=hidden', label: 1}]")
    assert "hidden" not in str(caught.value)
    assert "http://***@h/x?***" in str(caught.value)


def test_a_reward_model_that_scores_nothing_is_pointed_out() -> None:
    def lines(*sets: str) -> list[str]:
        return rewards_without_effect(load_config(overrides=[parse_set(s) for s in sets]).config)

    assert lines() == []
    assert lines("ppo.rewards=m:f", "stages=[sft,ppo]") == []
    assert "use --step 1 3" in lines("ppo.rewards=m:f")[0]
    assert lines("ppo.rewards=[model, 'm:f']") == []
    only_ppo = ("ppo.rewards=m:f", "stages=[ppo]", "model.reward=a/b")
    assert "--reward-model a/b is no source" in lines(*only_ppo)[0]
