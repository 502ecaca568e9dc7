"""Several values after one option, stage choice, and flags as settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_app.cli import join_values
from rlhf_app.commands.options import Flags
from rlhf_app.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["train", "--step", "1", "2", "3"], ["train", "--step", "1,2,3"]),
        (["--step", "1,2"], ["--step", "1,2"]),
        (["--step", "1", "2,3", "--seed", "2"], ["--step", "1,2,3", "--seed", "2"]),
        (["--step=1", "2"], ["--step=1", "2"]),  # not ours to guess; the parser complains
        (["--stages", "sft", "ppo", "--force"], ["--stages", "sft,ppo", "--force"]),
        (["--step", "4"], ["--step", "4"]),
        (["--step"], ["--step"]),
        (["--seed", "1", "2"], ["--seed", "1", "2"]),
    ],
)
def test_join_values(given: list[str], expected: list[str]) -> None:
    assert join_values(given) == expected


def flags(**given: Any) -> Flags:
    names = [
        "actor_model",
        "reward_model",
        "reward_source",
        "actor_zero_stage",
        "reward_zero_stage",
        "lora_rank",
        "data",
        "data_split",
        "sft_data",
        "reward_data",
        "ppo_data",
        "eval_data",
        "gold",
        "step",
        "stages",
        "deployment_type",
        "output_dir",
        "config",
        "resume",
        "seed",
        "set_values",
    ]
    return Flags(dict.fromkeys(names) | given)


def settings(given: Flags) -> dict[str, object]:
    return {override.key: override.value for override in given.overrides()}


def test_zero_stages_go_to_the_models_they_name() -> None:
    assert settings(flags(actor_zero_stage=2, reward_zero_stage=0)) == {
        "sft.zero_stage": 2,
        "ppo.actor.zero_stage": 2,
        "reward.zero_stage": 0,
        "ppo.critic.zero_stage": 0,
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"step": "1,2,3"}, ["sft", "reward", "ppo"]),
        ({"step": "3,1"}, ["sft", "ppo"]),
        ({"step": "reward"}, ["reward"]),
        ({"stages": "sft, reward"}, ["sft", "reward"]),
    ],
)
def test_stage_choice(given: dict[str, str], expected: list[str]) -> None:
    assert settings(flags(**given)) == {"stages": expected}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": "4"}, "--step 4: '4' is no stage"),
        ({"stages": "sft,dpo"}, "--stages sft,dpo: 'dpo' is no stage"),
        ({"step": "1", "stages": "sft"}, "give one of them"),
    ],
)
def test_bad_stage_choice(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flags(**given).overrides()


def test_a_flag_of_its_own_beats_set_and_names_itself() -> None:
    given = flags(seed=5, set_values=["seed=9", "ppo.kl_coef=0.2"], data=["a=2", "b"])
    assert settings(given) == {"seed": 5, "ppo.kl_coef": 0.2, "data.sources": ["a=2", "b"]}
    assert [o.origin for o in given.overrides() if o.key == "seed"] == ["--set", "--seed"]


def test_reward_sources_are_a_list() -> None:
    given = flags(reward_source=["model", "my.py:score=0.5"])
    assert settings(given) == {"ppo.rewards": ["model", "my.py:score=0.5"]}


def test_stage_commands_fix_the_stage() -> None:
    values = flags().values
    only = Flags({k: v for k, v in values.items() if k not in ("step", "stages")}, ("ppo",))
    assert settings(only) == {"stages": ["ppo"]}


def test_resume_takes_the_settings_of_the_run_that_it_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--resume {tmp_path}: holds no run"):
        flags(resume=str(tmp_path)).settings_file()
    (tmp_path / "config.yaml").write_text("seed: 7\n")
    given = flags(resume=str(tmp_path))
    assert given.settings_file() == tmp_path / "config.yaml"
    assert settings(given) == {"output_dir": str(tmp_path)}
    for other in ({"output_dir": "a"}, {"config": Path("b.yaml")}):
        with pytest.raises(ConfigError, match="give one of them"):
            flags(resume=str(tmp_path), **other).settings_file()
    assert flags(config=Path("b.yaml")).settings_file() == Path("b.yaml")
