"""The schema documents itself."""

from __future__ import annotations

from rlhf_app.config.keys import all_fields, did_you_mean, flatten, setting_keys
from rlhf_app.config.schema import RunConfig, SourceConfig


def test_every_setting_has_a_description() -> None:
    missing = [key for key, field in all_fields().items() if not field.description]
    missing += [key for key, field in SourceConfig.model_fields.items() if not field.description]
    assert missing == []


def test_keys_are_those_of_a_dumped_config() -> None:
    assert set(setting_keys()) == set(flatten(RunConfig().model_dump(mode="json")))


def test_suggestions() -> None:
    assert did_you_mean("ppo.klcoef") == "; did you mean ppo.kl_coef?"
    assert did_you_mean("gae_lambda") == "; did you mean ppo.gae_lambda?"
    assert did_you_mean("max_steps") == "; did you mean sft.max_steps or reward.max_steps?"
    assert did_you_mean("qqqqqqqq") == ""
