"""Runs with other rewards than the stage-2 model: what docs/rewards.md shows, and two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import HTTPServer
from pathlib import Path

import pytest

from rlhf_app.config.load import load_config
from stages.ppo.reward_sources.http import HttpReward
from stages.ppo.reward_sources.texts import TextAnswers

PAIRS = [
    {"prompt": f"{i:02d} ", "chosen": "yes" * (1 + i % 3), "rejected": "no" * (1 + i % 4)}
    for i in range(24)
]
LETTERS = "def e(prompts, responses):\n    return [r.count('e') / 5 for r in responses]\n"
SMALL = [
    f"--set={setting}"
    for setting in (
        "sft.max_steps=40", "ppo.updates=8", "ppo.rollout_batch_size=64",
        "ppo.micro_batch_size=32", "ppo.eval_prompts=32", "ppo.actor.learning_rate=0.002",
    )
]  # fmt: skip


def examples(repo_root: Path) -> dict[str, str]:
    """The code blocks of the page: by the file that their first line names, or their language."""
    text = (repo_root / "docs" / "rewards.md").read_text(encoding="utf-8")
    blocks = {}
    for language, body in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        name = re.match(r"# ([\w.]+)", body)
        blocks[name[1] if name else language] = body
    return blocks


def test_examples_of_the_documentation(repo_root, run_cli, tmp_path, monkeypatch):
    blocks = examples(repo_root)
    assert set(blocks) == {"my_rewards.py", "bash", "rewards.yaml", "server.py"}
    for name in ("my_rewards.py", "rewards.yaml"):
        (tmp_path / name).write_text(blocks[name])
    plans = [run_cli(*line.split()[1:], "--dry-run") for line in blocks["bash"].splitlines()]
    assert all(done.returncode == 0 for done in plans), [done.stderr for done in plans]
    assert "1 x short (function: my_rewards.py:short)" in plans[0].stdout
    assert "1 x model (the reward model)" in plans[1].stdout
    assert "0.5 x short (function: my_rewards.py:short)" in plans[1].stdout
    sources = load_config(config_file=tmp_path / "rewards.yaml").config.ppo.rewards
    assert [source.kind for source in sources] == ["model", "function", "http", "classifier"]

    # The function and the server, as they stand there.
    space: dict[str, object] = {"__name__": "docs"}
    exec(blocks["my_rewards.py"] + blocks["server.py"], space)
    assert space["short"](["", ""], ["a b c", "x " * 10]) == [-0.7, 0.0]  # type: ignore[operator]
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = HTTPServer(("127.0.0.1", 0), space["Scores"])  # type: ignore[arg-type]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/score"
    assert HttpReward(url, timeout=5, retries=0)(TextAnswers([], ["abc", ""])) == [3.0, 0.0]
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_two_stages_with_a_function_raise_its_reward(run_cli, tmp_path):
    """No reward model is trained, loaded or asked for; a changed file makes the stage stale."""
    (tmp_path / "my.py").write_text(LETTERS)
    train = ["train", "--step", "1", "3", "--reward-source", "my.py:e", *SMALL]
    done = run_cli(*train, timeout=280)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "output"
    assert not (out / "reward").exists()
    policies = json.loads((out / "ppo" / "result.json").read_text())["policies"]
    assert policies["ppo"]["reward"] > policies["sft"]["reward"] + 0.3
    lines = (out / "ppo" / "metrics.jsonl").read_text().splitlines()
    rewards = [r["reward"] for r in map(json.loads, lines) if r["kind"] == "train"]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.4

    (tmp_path / "my.py").write_text(LETTERS.replace("'e'", "'a'"))
    changed = run_cli(*train)
    assert changed.returncode == 2
    assert re.search(r"would change: ppo\.rewards\[0\] \w{12} -> \w{12}", changed.stderr)


@pytest.mark.slow
def test_two_ranks_agree_with_one(run_stage, tiny_lm, tmp_path):
    """A function and a classifier together; each rank scores its own answers."""
    (tmp_path / "my.py").write_text(LETTERS)
    classifier = one_label(tiny_lm, tmp_path / "classifier")
    settings = {
        "updates": 1, "rollout_batch_size": 8, "mini_batches": 2, "micro_batch_size": 2,
        "max_prompt_length": 8, "max_response_length": 6, "data": {"eval_fraction": 0.25},
        "critic": {"zero_stage": 2},
        "rewards": [
            {"function": "my.py:e", "weight": 3},
            {"classifier": str(classifier), "weight": -1, "std": 0.5, "clip": 2},
        ],
    }  # fmt: skip
    runs = [
        run_stage("ppo", PAIRS, tiny_lm, ranks=ranks, **json.loads(json.dumps(settings)))
        for ranks in (1, 2)
    ]
    names = ("reward", "reward_e", "reward_classifier", "reward_classifier_truncated", "loss")
    for alone, split in zip(*(run["metrics"] for run in runs), strict=True):
        for name in names:
            theirs, mine = split.get(name, 0.0), alone.get(name, 0.0)  # evaluations have no loss
            assert theirs == pytest.approx(mine, rel=2e-3, abs=2e-4), name
        expected = 3 * alone["reward_e"] - alone["reward_classifier"]
        cut = 1 - alone["eos_rate"]  # each such answer loses 1
        assert alone["reward"] == pytest.approx(expected - cut, abs=1e-5)
        assert abs(alone["reward_classifier"]) > 1e-3
        assert alone["reward_classifier_truncated"] == 0.0


@pytest.mark.slow
def test_an_endpoint_that_is_gone_ends_the_run_and_no_secret_is_written(run_cli, tiny_lm, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    done = run_cli(
        "ppo", "--actor-model", str(tiny_lm), "--data", str(data), "--deployment-type", "cpu",
        "--reward-source", "http://me:hidden@127.0.0.1:9/score?token=hidden",
        *(f"--set={key}" for key in (
            "ppo.rollout_batch_size=8", "ppo.micro_batch_size=2", "ppo.updates=1",
            "ppo.max_prompt_length=8", "ppo.max_response_length=6", "data.chat_format=plain",
            "data.eval_fraction=0.25",
        )),
        env={"no_proxy": "127.0.0.1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "reward endpoint http://***@127.0.0.1:9/score?***: connection refused, 4" in done.stderr
    written = [p for p in (tmp_path / "output").rglob("*") if p.suffix in (".log", ".json")]
    assert written
    assert not any("hidden" in path.read_text(errors="replace") for path in written)


def one_label(tiny_lm: Path, path: Path) -> Path:
    """A classifier of the actor's family, by plain transformers."""
    code = (
        "import sys, torch, transformers as tf\n"
        "torch.manual_seed(3)\n"
        "config = tf.AutoConfig.from_pretrained(sys.argv[1], num_labels=1)\n"
        "config.initializer_range = 0.3\n"
        "tf.LlamaForSequenceClassification(config).save_pretrained(sys.argv[2])\n"
        "tf.AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tiny_lm), str(path)], check=True, env=dict(os.environ)
    )
    return path
