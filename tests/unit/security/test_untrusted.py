"""Models, templates, settings and names from elsewhere: nothing in them runs or leads astray."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from rlhf_app import cli
from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.load import check_model_path, load_causal_lm, load_config
from rlhf_app.models.scalar_head import load_scalar_model
from rlhf_app.models.tokenizer import load_tokenizer
from rlhf_app.stage_run import remove_directory
from rlhf_app.training.checkpoint.store import CheckpointStore

CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM

class Own(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = Own
"""


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code_was_run"


@pytest.fixture
def model_with_code(model_dir, marker):
    """A model whose config names classes of a file beside it, as those of the Hub do."""
    config = json.loads((model_dir / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {
            "AutoConfig": "own.Own",
            "AutoModelForCausalLM": "own.OwnModel",
            "AutoModel": "own.OwnModel",
            "AutoTokenizer": ["own.Own", None],
        },
    }
    (model_dir / "config.json").write_text(json.dumps(config))
    (model_dir / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": config["auto_map"], "tokenizer_class": "Own"})
    )
    (model_dir / "own.py").write_text(CODE.format(marker=str(marker)))
    torch.save({}, model_dir / "pytorch_model.bin")
    return str(model_dir)


@pytest.mark.parametrize("load", [load_config, load_causal_lm, load_scalar_model, load_tokenizer])
def test_code_of_a_model_does_not_run_unless_asked(load, model_with_code, marker):
    keys = {} if load in (load_config, load_tokenizer) else {
        "dtype": torch.float32, "device": torch.device("cpu"),
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load(model_with_code, **keys)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_code_of_a_model_runs_where_it_is_trusted(model_with_code, marker, monkeypatch, tmp_path):
    """So the test above would see it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    assert load_config(model_with_code, trust_remote_code=True).model_type == "own"
    assert marker.exists()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Each character is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"</s>": 0} | {chr(i): i - 31 for i in range(32, 127)}
    fast = Tokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")


ESCAPES = {
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "attribute '__class__'",
    "{{ messages.__init__.__globals__ }}": "attribute '__init__'",
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}": "attribute '__init__'",
    "{{ lipsum.__globals__['os'].popen('touch MARKER').read() }}": "attribute '__globals__'",
    "{{ '{0.__class__.__mro__}'.format(messages) }}": "attribute '__class__'",
    "{{ messages.append(1) }}": "attribute 'append'",
    "{% for i in range(10**9) %}x{% endfor %}": "Range too big",
    "{% include '/etc/passwd' %}": "no loader",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ 'x' * 10**15 }}": "MemoryError",
    "{{ 1 / 0 }}": "ZeroDivision",
}


@pytest.mark.parametrize(("template", "why"), ESCAPES.items(), ids=range(len(ESCAPES)))
def test_templates_stay_in_their_sandbox(tokenizer, marker, tmp_path, template, why):
    file = tmp_path / "template.jinja"
    every = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file.write_text(every + template.replace("MARKER", str(marker)))
    with pytest.raises(ConfigError) as caught:
        ChatFormat(tokenizer, "template", template_file=str(file))
    assert re.match(rf"the chat template {file} .*{why}", str(caught.value)), caught.value
    assert "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch MARKER']",
        "!!python/object/new:os.system ['touch MARKER']",
        "!!python/name:os.system",
        "!!python/module:os",
    ],
)
def test_yaml_makes_no_objects(value, marker, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    value = value.replace("MARKER", str(marker))
    Path("run.yaml").write_text(f"seed: {value}\n")
    for arguments in (["--config", "run.yaml"], ["--set", f"seed={value}"]):
        assert cli.run(["train", *arguments, "--dry-run"]) == 2
        said = capsys.readouterr().err
        assert "could not determine a constructor" in said
        assert len(said.splitlines()) == 1
    assert not marker.exists()


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("name", ["../other/w", "/etc/w", "a/../../w"])
def test_an_index_of_weights_names_files_of_its_own_directory(model_dir, suffix, name):
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    index = {"weight_map": {"a": f"{stem}.{suffix}", "b": f"{name}.{suffix}"}}
    (model_dir / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    (model_dir / f"{stem}.{suffix}").touch()
    with pytest.raises(ConfigError, match=f"names {name}.{suffix}, which lies outside"):
        check_model_path(str(model_dir), "model.actor")


def test_sources_of_this_project_start_no_shell(repo_root):
    """Lint rule S catches it too; this also holds where somebody switched that off."""
    bad = re.compile(
        r"shell\s*=\s*True|\bos\.(system|popen)\(|subprocess\.getoutput|yaml\.(unsafe|full)_load"
    )
    for part in ("rlhf_app", "stages", "data_sources", "scripts"):
        for file in (repo_root / part).rglob("*.py"):
            assert not [line for line in file.read_text().splitlines() if bad.search(line)], file


@pytest.mark.parametrize("name", ["../../victim", "/etc/passwd", "a/../../victim"])
def test_a_checkpoint_that_names_files_elsewhere_is_none(tmp_path, name):
    store = CheckpointStore(tmp_path)
    store.path(3).mkdir()
    for listed, readable in ((name, False), ("rank0.pt", True)):
        values = {"step": 3, "total_steps": 9, "world_size": 1, "files": {listed: [1, "0" * 64]}}
        (store.path(3) / "checkpoint.json").write_text(json.dumps(values))
        assert (store.read(3) is not None) is readable


def test_links_in_a_run_directory_are_removed_and_their_targets_are_not(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    run = tmp_path / "out"
    (run / "sft").mkdir(parents=True)
    (run / "sft" / "model").symlink_to(victim)
    (run / "reward").symlink_to(victim)
    remove_directory(run / "sft")
    remove_directory(run / "reward")
    assert list(run.iterdir()) == []
    assert (victim / "file").exists()
