import argparse
import base64
import json

import pytest

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.ds_settings import split_config

BLOCK = {
    "enabled": True, "max_out_tokens": 512, "inference_tp_size": 1,
    "release_inference_cache": True, "pin_parameters": False, "tp_gather_partition_size": 4,
    "enable_cuda_graph": False,
}  # fmt: skip
CONFIG = {"train_batch_size": 8, "hybrid_engine": BLOCK}
REST = {"train_batch_size": 8}


def _check(ds_config, settings):
    assert ds_config == REST
    assert settings.model_dump(exclude={"compile_decode"}) == BLOCK


def test_the_block_is_taken_out_of_a_dict_and_the_dict_left_alone():
    config = {**CONFIG}
    _check(*split_config(None, config))
    assert config == CONFIG


def test_files_base64_and_arguments_are_read(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text("// comments are allowed\n" + json.dumps(CONFIG))
    _check(*split_config(None, str(path)))
    _check(*split_config(None, path))
    _check(*split_config(argparse.Namespace(deepspeed_config=str(path)), None))
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    _check(*split_config(None, encoded))


def test_without_a_block_the_defaults_hold():
    assert split_config(None, REST) == (REST, HybridEngineSettings())


@pytest.mark.parametrize(
    ("args", "config", "message"),
    [
        (None, None, "no DeepSpeed config"),
        (argparse.Namespace(deepspeed_config="a.json"), REST, "both config= and args"),
        (None, {"hybrid_engine": {"pin_params": 1}}, r"hybrid_engine.pin_params: .*keys: enabled"),
        (None, {"hybrid_engine": {"max_out_tokens": 0}}, "hybrid_engine.max_out_tokens"),
        (None, {"hybrid_engine": True}, "give a mapping"),
        (None, "no/such/file.json", "no such file"),
    ],
)
def test_bad_configs_are_named(args, config, message):
    with pytest.raises(ConfigError, match=message):
        split_config(args, config)


def test_duplicate_keys_are_an_error(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"a": 1, "a": 2}')
    with pytest.raises(ConfigError, match="duplicate keys a"):
        split_config(None, str(path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("/nowhere/ds.json", "no such file"),
        ("ds.json", "no such file"),
        (5, "config is 5: give a dict"),
        ([1], "give a dict"),
        ("", "give a dict"),
        ({"hybrid_engine": {1: 2}}, "give a mapping"),
    ],
)
def test_a_config_that_is_none(config, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        split_config(None, config)


def test_an_empty_file_is_no_config(tmp_path):
    (tmp_path / "ds.json").write_text("")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        split_config(None, str(tmp_path / "ds.json"))
