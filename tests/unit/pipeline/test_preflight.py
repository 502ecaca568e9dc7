"""Bad input is found before a worker starts, in one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_app.config.load import load_config, parse_set
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.preflight import check_inputs, check_sizes
from rlhf_app.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain-dir").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "file.txt").write_text("x")
    one = {"id2label": {"0": "LABEL_0"}}
    for name, labels in (("one-label", one), ("two-labels", {}), ("ours", one)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "bert"} | labels))
    (tmp_path / "ours" / "reward_config.json").write_text("{}")
    (tmp_path / "empty.jinja").write_text(" ")
    (tmp_path / "bad.jinja").write_text("{{ messages }}\n{% if %}")
    marks = "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}"
    (tmp_path / "good.jinja").write_text(marks + "{% endfor %}")
    (tmp_path / "score.py").write_text("def good(prompts, answers): return [1.0] * len(answers)")


def configure(*sets: str) -> RunConfig:
    defaults = [
        "model.actor=base-model",
        "data.sources=[pairs.jsonl]",
        "ppo.max_prompt_length=64",
        "ppo.max_response_length=64",
    ]
    return load_config(overrides=[parse_set(s) for s in [*defaults, *sets]]).config


SIZES = [
    # (settings, processes, message or None)
    (["sft.batch_size=32", "sft.micro_batch_size=8"], 4, None),
    (
        ["sft.batch_size=30", "sft.micro_batch_size=8"],
        1,
        "sft.batch_size = 30: is not divisible by 8 (sft.micro_batch_size 8 x processes 1); "
        "set sft.batch_size to 32",
    ),
    (
        ["sft.batch_size=32", "sft.micro_batch_size=8"],
        3,
        "sft.batch_size = 32: is not divisible by 24 (sft.micro_batch_size 8 x processes 3); "
        "set sft.batch_size to 24",
    ),
    (
        ["reward.batch_size=4", "reward.micro_batch_size=8"],
        1,
        "reward.batch_size = 4: is not divisible by 8 (reward.micro_batch_size 8 x processes 1); "
        "set reward.batch_size to 8",
    ),
    (
        ["ppo.rollout_batch_size=64", "ppo.mini_batches=3", "stages=[ppo]"],
        2,
        "ppo.rollout_batch_size = 64: is not divisible by 48 (ppo.mini_batches 3 x "
        "ppo.micro_batch_size 8 x processes 2); set ppo.rollout_batch_size to 48",
    ),
    (["ppo.rollout_batch_size=63", "stages=[sft]"], 1, None),  # not a chosen stage
    # Under a token budget only mini-batches and ranks must divide.
    (["sft.batch_size=63", "sft.micro_batch_tokens=512", "stages=[sft]"], 2, None),
    (["ppo.rollout_batch_size=62", "ppo.micro_batch_tokens=512", "stages=[ppo]"], 2, None),
    (
        ["ppo.rollout_batch_size=63", "ppo.micro_batch_tokens=512", "stages=[ppo]"],
        2,
        "is not divisible by 2 (ppo.mini_batches 1 x processes 2); set ppo.rollout_batch_size",
    ),
    (
        ["ppo.critic.grad_accum_dtype=bf16", "model.dtype=fp32"],
        1,
        "ppo.critic.grad_accum_dtype = bf16: the model is not trained in bf16 (model.dtype is",
    ),
    (["sft.grad_accum_dtype=bf16", "deployment.type=cpu"], 1, "set model.dtype to bf16, or sft."),
    (["sft.grad_accum_dtype=bf16", "deployment.type=single_gpu"], 1, None),
    (["sft.grad_accum_dtype=bf16", "model.dtype=fp32", "stages=[ppo]"], 1, None),
    (["reward.adam_kernel=deepspeed", "deployment.type=cpu"], 1, "reward.adam_kernel = deepspeed"),
    (["gold.scorer=math:fsum"], 1, None),
    (["gold.scorer=no_such_package:f"], 1, "--gold no_such_package:f: no module no_such_package"),
    (["gold.scorer=score.py:bad"], 1, "--gold score.py:bad: score.py has no bad"),
    (["hybrid_engine.inference_tp_size=2"], 1, "inference_tp_size = 2 must divide the number of"),
    (["hybrid_engine.inference_tp_size=2"], 4, None),
    (["hybrid_engine.inference_tp_size=3"], 4, "processes (4)"),
    (["hybrid_engine.inference_tp_size=3", "hybrid_engine.enabled=false"], 4, None),
    (["hybrid_engine.inference_tp_size=3", "stages=[sft]"], 4, None),
    (["hybrid_engine.max_out_tokens=127", "stages=[sft]"], 1, None),
    (["hybrid_engine.max_out_tokens=128"], 1, None),
    (["hybrid_engine.max_out_tokens=127"], 1, "ppo.max_response_length need 128; set it to"),
    (["gold.scorer=pkg.module"], 1, "--gold pkg.module: expected module:function"),
    (["gold.scorer='a b:c'"], 1, "--gold a b:c: expected module:function"),
    (["gold.scorer=file:c:d"], 1, "--gold file:c:d: expected module:function"),
    (["gold.scorer=score.py:good"], 1, None),
    (["gold.scorer=dir/none.py:good"], 1, "--gold dir/none.py:good: no file dir/none.py"),
    ([f"gold.scorer={'x' * 300}.py:good"], 1, "no file xxx"),
    (["ppo.actor.zero_stage=3"], 2, None),
    (["ppo.rewards=[model, 'score.py:good', 'http://h/x', some/classifier]"], 1, None),
    (["ppo.rewards='no_such_package:f'"], 1, "--reward-source no_such_package:f: no module no_su"),
    (["ppo.rewards='score.py:bad'"], 1, "--reward-source score.py:bad: score.py has no bad"),
    (["ppo.rewards='none.py:good'"], 1, "--reward-source none.py:good: no file none.py"),
    (["ppo.rewards='none.py:good'", "stages=[sft]"], 1, None),
    (["ppo.rewards=./nowhere"], 1, "--reward-source ./nowhere: no such directory"),
    (["ppo.rewards=score.py"], 1, "score.py: is a file; name a function in it as score.py:funct"),
    (["ppo.rewards=plain-dir"], 1, "--reward-source plain-dir: has no readable config.json"),
    (["ppo.rewards=two-labels"], 1, "two-labels: has 2 labels (0 LABEL_0, 1 LABEL_1); name the"),
    (["ppo.rewards=[{classifier: two-labels, label: 1}]"], 1, None),
    (["ppo.rewards=[{classifier: two-labels, label: label_1}]"], 1, None),
    (["ppo.rewards=[{classifier: two-labels, label: good}]"], 1, "no label good; it has 0 LABEL"),
    (["ppo.rewards=one-label"], 1, None),
    (["ppo.rewards=ours"], 1, "ours: is a reward model of the reward stage: name it with --reward"),
    (["ppo.rewards=[{classifier: ours, mean: 0.5, std: 2}]"], 1, None),
    (["ppo.rewards=[{classifier: one-label, label: 1}]"], 1, "no label 1; it has 0 LABEL_0"),
]


@pytest.mark.parametrize(("sets", "processes", "message"), SIZES)
def test_sizes(sets: list[str], processes: int, message: str | None) -> None:
    config = configure(*sets)
    if message is None:
        check_sizes(config, processes)
        return
    with pytest.raises(ConfigError) as caught:
        check_sizes(config, processes)
    assert message in str(caught.value)


INPUTS = [
    (["model.actor=missing/model/dir"], "--actor-model missing/model/dir: no such directory"),
    (["model.actor=./missing"], "--actor-model ./missing: no such directory"),
    (["model.actor=/missing"], "--actor-model /missing: no such directory"),
    (["model.actor=plain-dir/x"], "--actor-model plain-dir/x: no such directory"),
    (["model.actor=plain-dir"], "--actor-model plain-dir: has no config.json"),
    (["model.actor=broken"], "--actor-model broken: config.json is not valid JSON"),
    (["model.actor=file.txt"], "--actor-model file.txt: is a file"),
    (["model.reward=plain-dir"], "--reward-model plain-dir: has no config.json"),
    (["data.sources=[nope.jsonl]"], "--data nope.jsonl: no such file or directory"),
    (["data.sources=[/nope]"], "--data /nope: no such file or directory"),
    (["data.sft=[nope.csv]"], "--sft-data nope.csv: no such file"),
    (["data.reward=[nope.parquet]"], "--reward-data nope.parquet: no such file"),
    (["data.ppo=[nope.json.gz]"], "--ppo-data nope.json.gz: no such file"),
    (["data.eval=[plain-dir/e]"], "--eval-data plain-dir/e: no such file"),
    (["data.sources=['*.jsonl.zst']"], "--data *.jsonl.zst: no file matches the pattern"),
    (
        ["data.sources=[{path: 's3://bucket/a.jsonl', normaliser: 'nope.py:f'}]"],
        "data normaliser nope.py:f: no file nope.py",
    ),
    (
        ["data.sources=[{path: 's3://bucket/a.jsonl', normaliser: nonsense}]"],
        "data normaliser nonsense: expected module:function",
    ),
    (["data.sources=[]", "data.sft=[pairs.jsonl]"], "reward has no data: name some with --data"),
    (["data.split=0,4,4"], "data.split gives sft no rows"),
    (
        ["ppo.max_prompt_length=100", "ppo.max_response_length=29"],
        "ppo.max_prompt_length 100 + ppo.max_response_length 29 = 129: base-model takes 128",
    ),
    (["data.max_length=129"], "data.max_length = 129: base-model takes 128 tokens"),
    (
        ["model.reward=facebook/opt-350m", "data.max_length=2049", "model.actor=some/model"],
        "data.max_length = 2049: facebook/opt-350m takes 2048 tokens",
    ),
    (
        ["ppo.ptx_coef=1", "ppo.ptx_data=[nope.jsonl]"],
        "ppo.ptx_data nope.jsonl: no such file or directory",
    ),
    (
        [
            "stages=[ppo]",
            "data.sources=[]",
            "data.ppo=[pairs.jsonl]",
            "ppo.ptx_coef=2",
            "ppo.rewards=[{function: 'score.py:good'}]",
        ],
        "ppo.ptx_coef 2 needs text: name some with ppo.ptx_data or --sft-data",
    ),
    (["data.chat_template=nope.jinja"], "data.chat_template nope.jinja: no such file"),
    (["data.chat_template=empty.jinja"], "data.chat_template empty.jinja: is empty"),
    (["data.chat_template=bad.jinja"], "data.chat_template bad.jinja: line 2: "),
    (["stages=[ppo]"], "PPO needs a reward model"),
    (["ppo.keep_best=gold", "ppo.eval_every=1"], "ppo.keep_best = gold: there is no gold scorer"),
]


@pytest.mark.parametrize(("sets", "message"), INPUTS)
def test_bad_inputs(model_dir: Path, data_file: Path, sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(configure(*sets), RunDirectory(Path("out")))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["model.actor=some/model"],
        ["model.actor=gpt2", "data.sources=['org/set', 'org/set:config']"],
        ["model.actor=facebook/opt-1.3b", "data.max_length=2048"],
        ["ppo.max_prompt_length=100", "ppo.max_response_length=28"],
        ["data.max_length=128"],
        ["data.split=0,4,4", "data.sft=[pairs.jsonl]"],
        ["data.split=0,4,4", "stages=[reward, ppo]"],
        ["data.split=shared"],
        ["data.chat_template=good.jinja"],
        ["ppo.keep_best=gold", "ppo.eval_every=1", "gold.scorer=score.py:good"],
        ["ppo.keep_best=gold", "ppo.eval_every=1", "stages=[sft]"],
        ["stages=[ppo]", "model.reward=some/reward-model"],
    ],
)
def test_good_inputs(model_dir: Path, data_file: Path, sets: list[str]) -> None:
    check_inputs(configure(*sets), RunDirectory(Path("out")))


def test_what_an_earlier_command_left_does_not_bound_this_one(
    model_dir: Path, data_file: Path
) -> None:
    """An `output/` of another model: reuse has its own say about that, with the way out."""
    left = Path("out/reward/model")
    left.mkdir(parents=True)
    (left / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 16}')
    check_inputs(configure(), RunDirectory(Path("out")))
    with pytest.raises(ConfigError, match="takes 16 tokens"):
        check_inputs(
            configure("stages=[ppo]", "model.reward=out/reward/model"), RunDirectory(Path("out2"))
        )
