"""The `lora` groups: the run's defaults, each model's own, and what they change."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_app.config.load import Override, load_config, load_saved, parse_set
from rlhf_app.config.lora import settings_without_effect
from rlhf_app.config.schema import LoraDefaults, RunConfig, SFTConfig
from rlhf_app.config.yaml_files import dump_config
from rlhf_app.errors import ConfigError
from rlhf_app.manifest import stage_settings


def loras(config: RunConfig) -> list:
    return [config.sft.lora, config.reward.lora, config.ppo.actor.lora, config.ppo.critic.lora]


def load(*settings: str) -> RunConfig:
    pairs = [text.split("=") for text in settings]
    return load_config(overrides=[Override(key, value, "--set") for key, value in pairs]).config


def test_off_by_default_and_the_models_own_learning_rate_counts() -> None:
    config = RunConfig()
    assert [lora.enabled for lora in loras(config)] == [False] * 4
    assert config.sft.peak_learning_rate == config.sft.learning_rate == 1e-5


def test_the_default_reaches_every_model_and_their_own_values_win() -> None:
    config = RunConfig.model_validate(
        {
            "lora": {"rank": 8, "target_modules": "q_proj, v_proj"},
            "reward": {"lora": {"rank": 0}},
            "ppo": {"actor": {"lora": {"rank": 4, "rollout": "fused"}}},
        }
    )
    assert [lora.rank for lora in loras(config)] == [8, 0, 4, 8]
    assert {lora.target_modules for lora in loras(config)} == {("q_proj", "v_proj")}
    assert config.reward.peak_learning_rate == config.reward.learning_rate
    assert config.sft.lora.scaling == 32 / 8


def test_complaint_dsc11_adapters_have_a_learning_rate_of_their_own() -> None:
    """DSE#489: at the rate of the whole model, which is left when a rank is set, nothing moves."""
    config = RunConfig.model_validate({"lora": {"rank": 8}})
    for settings in (config.sft, config.reward, config.ppo.actor, config.ppo.critic):
        assert settings.peak_learning_rate == settings.lora.learning_rate
        assert settings.lora.learning_rate >= 10 * settings.learning_rate


def test_a_learning_rate_for_all_and_groups_built_in_code() -> None:
    config = RunConfig(lora=LoraDefaults(rank=2, learning_rate=7e-4), sft=SFTConfig(epochs=2.0))
    assert config.sft.epochs == 2.0
    assert [lora.learning_rate for lora in loras(config)] == [7e-4] * 4
    assert config.sft.lora.rank == 2


def test_a_saved_config_is_read_back_the_same(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"lora": {"rank": 8}, "sft": {"lora": {"rank": 0}}})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_saved(tmp_path / "config.yaml") == config


def test_a_config_written_before_there_was_lora_loads(tmp_path: Path) -> None:
    before = tmp_path / "config.yaml"
    before.write_text("seed: 5\nsft:\n  epochs: 2\nppo:\n  kl_coef: 0.2\n")
    assert load_saved(before).ppo.actor.lora.rank == 0


@pytest.mark.parametrize("model", ["ppo.actor", "ppo.critic"])
def test_ppo_takes_no_dropout(model: str) -> None:
    with pytest.raises(ConfigError, match=rf"{model}.lora.dropout = '0.1' .*equal to 0"):
        load(f"{model}.lora.dropout=0.1")
    assert load("sft.lora.dropout=0.1").sft.lora.dropout == 0.1


def test_no_names_is_an_error() -> None:
    with pytest.raises(ConfigError, match="target_modules"):
        load("sft.lora.target_modules=,")


def test_only_what_has_an_effect_makes_a_finished_stage_stale() -> None:
    def stage(**sft: object) -> dict[str, object]:
        return stage_settings(RunConfig.model_validate({"sft": sft}), "sft")

    off = stage()
    assert not [key for key in off if "lora" in key]  # as before there was LoRA
    assert stage(lora={"alpha": 5.0}) == off
    on = stage(lora={"rank": 4})
    assert on != off
    assert stage(lora={"rank": 4}, learning_rate=1.0) == on
    assert stage(lora={"rank": 4, "learning_rate": 1.0}) != on
    assert stage(learning_rate=1.0) != off
    both = RunConfig.model_validate({"lora": {"rank": 4}})
    assert stage_settings(both, "sft") == on
    assert stage_settings(both, "ppo")["ppo.critic.lora.rank"] == 4


@pytest.mark.parametrize(
    ("sets", "warnings"),
    [
        ([], []),
        (["lora.rank=4", "lora.alpha=8"], []),
        (["lora.alpha=8"], ["lora.alpha has no effect without --lora-rank"]),
        (["ppo.actor.lora.rollout=fused"],
         ["ppo.actor.lora.rollout has no effect without ppo.actor.lora.rank"]),
        (["sft.lora.rank=4", "lora.alpha=8"], []),
        (["sft.lora.rank=4", "reward.lora.alpha=8"],
         ["reward.lora.alpha has no effect without reward.lora.rank"]),
    ],
)  # fmt: skip
def test_settings_without_effect_are_named(sets, warnings):
    config = load_config(overrides=[parse_set(s) for s in sets]).config
    groups = {
        "sft": config.sft.lora, "reward": config.reward.lora,
        "ppo.actor": config.ppo.actor.lora, "ppo.critic": config.ppo.critic.lora,
    }  # fmt: skip
    assert settings_without_effect(groups, config.lora) == warnings
