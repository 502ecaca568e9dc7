"""Secrets planted wherever a user can put one, and everything that a run writes or prints.

One real run: data behind a login and a key, a reward server behind others that answers once
and then refuses and repeats all that it was sent, a token for the Hub in the environment.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from rlhf_app import cli

TOKEN = "hf_PlantedTokenOfTheHub0123456789"
SECRETS = {
    "data login": "dataPa55word",
    "data query": "dataKey4711",
    "reward login": "rewardPa%40ss word".replace(" ", ""),
    "reward login, decoded": "rewardPa@ssword",
    "reward query": "rewardKey0815",
    "reward header": base64.b64encode(b"bob:rewardPa@ssword").decode(),
    "data header": base64.b64encode(b"ann:dataPa55word").decode(),
    "token": TOKEN,
    "other token": "An0therSecretOfTheEnvironment",
}


def found_in(text: str) -> list[str]:
    return [name for name, secret in SECRETS.items() if secret in text]


class Server(BaseHTTPRequestHandler):
    """Rows for whoever knows the login and the key; scores once, then a talkative refusal."""

    asked = 0

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Basic {SECRETS['data header']}"
        known &= self.path == f"/rows.jsonl?key={SECRETS['data query']}"
        rows = [
            {"prompt": f"{i:02d} ", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(16)
        ]
        self._answer(200 if known else 403, "\n".join(map(json.dumps, rows)))

    def do_POST(self) -> None:
        count = len(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["responses"])
        type(self).asked += 1
        if type(self).asked == 1:
            self._answer(200, json.dumps({"scores": [0.5] * count}))
            return
        self._answer(403, f"key={self.path[-13:]} {self.headers['Authorization']} {self.path}")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Server.asked = 0
    with HTTPServer(("127.0.0.1", 0), Server) as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{found.server_port}"
        found.shutdown()


@pytest.mark.slow
def test_a_run_keeps_every_secret_to_itself(server, tiny_lm, tmp_path, run_cli):
    data = f"http://ann:{SECRETS['data login']}@{server}/rows.jsonl?key={SECRETS['data query']}"
    reward = f"http://bob:{SECRETS['reward login']}@{server}/score?key={SECRETS['reward query']}"
    out, cache = tmp_path / "out", tmp_path / "cache"
    settings = {
        "private": True,
        "data": {"ppo": [data], "chat_format": "plain", "eval_fraction": 0.25},
        "ppo": {
            "rollout_batch_size": 8,
            "max_prompt_length": 8,
            "max_response_length": 4,
            "updates": 3,
            "micro_batch_size": 8,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    command = ["train", "--step", "3", "--config", "run.yaml", "--actor-model", str(tiny_lm)]
    command += ["--reward-source", reward, "--deployment-type", "cpu", "--output-dir", str(out)]
    env = {"HF_TOKEN": TOKEN, "MY_API_KEY": SECRETS["other token"], "HF_HUB_OFFLINE": "1"}
    env |= {"RLHF_CACHE": str(cache), "no_proxy": "127.0.0.1", "OMP_NUM_THREADS": "1"}

    plan = run_cli(*command, "--dry-run", env=env)
    assert plan.returncode == 0, plan.stderr
    assert f"http://***@{server}/score?***" in plan.stdout
    assert not found_in(plan.stdout + plan.stderr)

    done = run_cli(*command, "--debug", env=env)
    assert done.returncode == 2, done.stderr
    assert Server.asked == 2, "the first scores came, so the whole address reached the workers"
    assert f"http://***@{server}/score?***: status 403: *** Basic *** /score?***" in done.stderr
    assert not found_in(done.stdout + done.stderr)
    written = {path: path.read_bytes().decode(errors="replace") for path in files(out, cache)}
    names = {str(path.relative_to(out)) for path in written if path.is_relative_to(out)}
    assert {"config.yaml", "manifest.json", "ppo/metrics.jsonl"} <= names
    assert {"ppo/logs/rank0.log", "ppo/error_rank0.json"} <= names
    assert {str(path): found for path, text in written.items() if (found := found_in(text))} == {}
    assert f"http://***@{server}/score?***" in written[out / "config.yaml"]
    # `private` was asked for: workers inherit it.
    assert [path for path in (out, *out.rglob("*")) if path.stat().st_mode & 0o077] == []

    # What was left out cannot be used by mistake.
    again = run_cli("train", "--config", str(out / "config.yaml"), "--output-dir", "other", env=env)
    assert again.returncode == 2
    assert "its password or query is not kept in files of a run" in again.stderr
    assert len(again.stderr.splitlines()) == 1


def files(*directories: Path) -> list[Path]:
    return [path for root in directories for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("command", ["inspect", "stats", "stats --json", "stats --html page.html"])
def test_what_is_shown_of_data(command, server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")
    login, key = SECRETS["data login"], SECRETS["data query"]
    for known, code in ((key, 0), (f"no{key}", 2)):
        url = f"http://ann:{login}@{server}/rows.jsonl?key={known}"
        flags = ["--data", url, "--data-split", "shared", "--set", "data.eval_fraction=0.25"]
        assert cli.run(["data", *command.split(), *flags]) == code
        printed = capsys.readouterr()
        assert not found_in(printed.out + printed.err)
        assert f"http://***@{server}/rows.jsonl?***" in printed.out + printed.err or not code
    assert not [path for path in files(tmp_path) if found_in(path.read_text(errors="replace"))]


URL = "https://ann:dataPa55word@h.invalid/x?key=dataKey4711"


@pytest.mark.parametrize(
    "setting",
    [
        f"data.sources={URL}",
        f"data.sources=[{{path: '{URL}', weight: x}}]",
        f"data.cache_dir=[{URL}]",
        f"model.actor={URL}",
        f"model.reward={URL}",
        f"ppo.rewards=[{{http: '{URL}', weight: 0}}]",
        f"ppo.rewards=[{{function: '{URL}'}}]",
        f"ppo.rewards=[{{classifier: '{URL}'}}]",
        f"gold.scorer={URL}",
        f"seed={URL}",
        f"nothing={URL}",
        f"{URL}=1",
        f"seed: {URL}",
        f"seed=[{URL}",
        f"seed={TOKEN}",
        f"model.actor=x/{TOKEN}/y",
        "ppo.kl_coef=An0therSecretOfTheEnvironment",
    ],
)
def test_errors_do_not_repeat_secrets(setting, tmp_path, monkeypatch, capsys):
    """Most of these are refused; whatever is said must not hold the secret."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MY_SECRET", SECRETS["other token"])
    monkeypatch.chdir(tmp_path)
    code = cli.run(["train", "--set", setting, "--dry-run", "--debug"])
    printed = capsys.readouterr()
    assert not found_in(printed.out + printed.err)
    assert code in (0, 2), printed.err
