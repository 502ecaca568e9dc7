"""The controller with real worker processes; the stages in them are stand-ins.

A `sitecustomize` on PYTHONPATH puts stand-ins in the place of the stage modules, so that
launching, following, failing, interrupting and reusing are tested in seconds, without torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

_STAND_INS = """
import json, os, sys, time, types

def make(stage):
    def main(config, run):
        rank = int(os.environ["RANK"])
        print("hello from", stage, "rank", rank, "threads", os.environ["OMP_NUM_THREADS"])
        fault = os.environ.get("FAULT", "")
        if fault == f"{stage}:{rank}:error":
            raise ValueError("the numbers do not add up")
        if fault == f"{stage}:{rank}:config":
            from rlhf_app.errors import ConfigError
            raise ConfigError("row 7 of pairs.jsonl has no answer; remove it")
        if fault == f"{stage}:{rank}:die":
            os.kill(os.getpid(), 9)
        if fault == f"{stage}:hang":
            (run.stage(stage) / f"pid{rank}").write_text(str(os.getpid()))
            time.sleep(600)
        if rank:
            return
        from rlhf_app.training.metrics import MetricsWriter
        from rlhf_app.training.files import atomic_write_json
        writer = MetricsWriter(run.metrics(stage))
        for step in (1, 2):
            writer.write(kind="train", step=step, total_steps=2, loss=1.0 / step)
        writer.close()
        artifact = run.artifact(stage)
        artifact.mkdir()
        if stage == "ppo":
            run.critic.mkdir()
        # Depends on the seed, as weights do.
        text = json.dumps({"seed": config.seed, "epochs": config.sft.epochs})
        (artifact / "config.json").write_text(text)
        with open("order.txt", "a") as file:
            file.write(stage + "\\n")
        policy = {
            "reward": 0.25, "kl_per_answer": 1.0, "distinct_3": 0.5,
            "answer_length": 8.0, "eos_rate": 1.0,
        }
        result = {
            "wall_seconds": 1.0, "startup_seconds": 0.5, "steps": 2, "updates": 2,
            "eval_perplexity": {"before": 9.0, "after": 3.0},
            "eval_accuracy": 0.75, "eval_margin": 1.0,
            "rows": {"train": 2, "eval": 1, "dropped": {}},
            "policies": {
                name: policy | {"gold": gold}
                for name, gold in (("base", 0.0), ("sft", 0.25), ("ppo", 0.5))
            },
            "samples": [{"prompt": "p", "base": "b", "sft": "s", "ppo": "o"}],
        }
        atomic_write_json(run.result(stage), result)
    module = types.ModuleType(f"stages.{stage}.train")
    module.main = main
    return module

for stage in ("sft", "reward", "ppo"):
    sys.modules[f"stages.{stage}.train"] = make(stage)
"""


@pytest.fixture
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which workers run the stand-in stages."""
    folder = tmp_path_factory.mktemp("stand-ins")
    (folder / "sitecustomize.py").write_text(_STAND_INS)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture
def command(model_dir: Path, data_file: Path) -> list[str]:
    return [
        "train",
        *("--actor-model", model_dir.name, "--data", data_file.name, "--output-dir", "out"),
        *("--deployment-type", "cpu"),
        *("--set", "ppo.max_prompt_length=64", "--set", "ppo.max_response_length=64"),
    ]


def statuses(out: Path) -> dict[str, str]:
    stages = json.loads((out / "manifest.json").read_text())["stages"]
    return {name: record["status"] for name, record in stages.items()}


def order(tmp_path: Path) -> list[str]:
    return (tmp_path / "order.txt").read_text().split()


def test_run_then_reuse(
    run_cli: Run, tmp_path: Path, command: list[str], stand_ins: dict[str, str]
) -> None:
    first = run_cli(*command, env=stand_ins)
    assert first.returncode == 0, first.stderr
    assert order(tmp_path) == ["sft", "reward", "ppo"]
    assert "sft: step 2/2  loss 0.5000" in first.stdout
    assert "gold 0.250 (sft) -> 0.500 (ppo)" in first.stdout
    out = tmp_path / "out"
    assert statuses(out) == {"sft": "finished", "reward": "finished", "ppo": "finished"}
    log = (out / "sft" / "logs" / "rank0.log").read_text()
    assert "hello from sft rank 0" in log
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ppo"]["gold"] == {"base": 0.0, "sft": 0.25, "ppo": 0.5}
    record = json.loads((out / "manifest.json").read_text())["stages"]["ppo"]
    assert set(record["inputs"]) == {
        "input actor",
        "input reward",
        "input base",
        "data.sources[0]",
    }
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))

    second = run_cli(*command, env=stand_ins)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("reused, unchanged") == 3
    assert order(tmp_path) == ["sft", "reward", "ppo"]
    assert "gold 0.250 (sft) -> 0.500 (ppo)" in second.stdout


def test_changed_settings_need_force(
    run_cli: Run, tmp_path: Path, command: list[str], stand_ins: dict[str, str]
) -> None:
    assert run_cli(*command, env=stand_ins).returncode == 0
    saved = (tmp_path / "out" / "config.yaml").read_text()
    changed = [*command, "--set", "reward.epochs=2"]
    refused = run_cli(*changed, env=stand_ins)
    assert refused.returncode == 2
    assert refused.stderr == (
        "rlhf: error: out/reward is finished, but would change: reward.epochs 1.0 -> 2.0; use "
        "--force to redo it and the stages after it, or another --output-dir\n"
    )
    assert (tmp_path / "out" / "config.yaml").read_text() == saved
    assert order(tmp_path) == ["sft", "reward", "ppo"]
    planned = run_cli(*changed, "--dry-run", env=stand_ins)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.splitlines()[-5:] == [
        "# Stages in out",
        "  sft: finished, would be reused",
        "  reward: finished, would be done again, with --force alone",
        "  ppo: finished, would be done again, with --force alone",
        "The run would stop: " + refused.stderr.removeprefix("rlhf: error: ").strip(),
    ]
    planned = run_cli(*changed, "--force", "--dry-run", env=stand_ins)
    assert "sft: reused, unchanged" in planned.stdout
    assert "reward: finished, would be done again\n" in planned.stdout
    assert "would stop" not in planned.stdout
    planned = run_cli(*command, "--dry-run", env=stand_ins)
    assert planned.stdout.count("finished, would be reused") == 3
    assert order(tmp_path) == ["sft", "reward", "ppo"]
    forced = run_cli(*changed, "--force", env=stand_ins)
    assert forced.returncode == 0, forced.stderr
    assert "sft: reused, unchanged" in forced.stdout
    assert order(tmp_path) == ["sft", "reward", "ppo", "reward", "ppo"]


def test_force_keeps_what_the_run_reads(
    run_cli: Run, tmp_path: Path, command: list[str], stand_ins: dict[str, str]
) -> None:
    assert run_cli(*command, "--stages", "sft", env=stand_ins).returncode == 0
    own = [*command, "--stages", "sft", "--force", "--actor-model", "out/sft/model"]
    refused = run_cli(*own, env=stand_ins)
    assert refused.returncode == 2
    assert "--actor-model out/sft/model: lies in out/sft, which this run empties" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert (tmp_path / "out" / "sft" / "model" / "config.json").is_file()


def test_stages_one_at_a_time(
    run_cli: Run, tmp_path: Path, command: list[str], stand_ins: dict[str, str]
) -> None:
    common = [*command[1:], "--data-split", "shared"]
    for stage in ("sft", "reward", "ppo"):
        done = run_cli(stage, *common, env=stand_ins)
        assert done.returncode == 0, done.stderr
    assert order(tmp_path) == ["sft", "reward", "ppo"]
    # The same run in one command: nothing is left to do.
    whole = run_cli("train", *common, env=stand_ins)
    assert whole.stdout.count("reused, unchanged") == 3, whole.stdout + whole.stderr


def test_a_failing_worker(
    run_cli: Run, tmp_path: Path, command: list[str], stand_ins: dict[str, str]
) -> None:
    done = run_cli(*command, env=stand_ins | {"FAULT": "reward:0:error"})
    assert done.returncode == 1
    assert done.stderr == (
        "rlhf: error: reward: rank 0 failed: ValueError: the numbers do not add up "
        "(log: out/reward/logs/rank0.log)\n"
    )
    out = tmp_path / "out"
    assert statuses(out) == {"sft": "finished", "reward": "failed"}
    assert "Traceback" in (out / "reward" / "logs" / "rank0.log").read_text()
    error = json.loads((out / "reward" / "error_rank0.json").read_text())
    assert error["type"] == "ValueError"
    again = run_cli(*command, env=stand_ins)
    assert again.returncode == 0, again.stderr
    assert order(tmp_path) == ["sft", "reward", "ppo"]
    assert not (out / "reward" / "error_rank0.json").exists()


def test_bad_input_found_by_a_worker(
    run_cli: Run, command: list[str], stand_ins: dict[str, str]
) -> None:
    done = run_cli(*command, env=stand_ins | {"FAULT": "sft:0:config"})
    assert done.returncode == 2
    assert done.stderr == "rlhf: error: row 7 of pairs.jsonl has no answer; remove it\n"


def test_a_killed_worker_is_started_anew(
    run_cli: Run, tmp_path: Path, command: list[str], stand_ins: dict[str, str]
) -> None:
    done = run_cli(*command, env=stand_ins | {"FAULT": "ppo:0:die"})
    assert done.returncode == 1
    assert "ppo: killed by SIGKILL (out of memory?); the log ends with: hello from" in done.stderr
    again = run_cli(*command, env=stand_ins)
    assert again.returncode == 0, again.stderr
    assert order(tmp_path) == ["sft", "reward", "ppo"]


def test_a_directory_that_is_not_ours(
    run_cli: Run, tmp_path: Path, command: list[str], stand_ins: dict[str, str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    done = run_cli(*command, "--force", env=stand_ins)
    assert done.returncode == 2
    assert "has no manifest.json" in done.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_two_processes(
    run_cli: Run, tmp_path: Path, command: list[str], stand_ins: dict[str, str]
) -> None:
    two = [*command, "--set", "deployment.num_processes=2", "--stages", "sft"]
    done = run_cli(*two, env=stand_ins | {"FAULT": "sft:1:error"})
    assert done.returncode == 1
    assert (
        "sft: rank 1 failed: ValueError: the numbers do not add up (log: out/sft/logs/rank1.log)"
    ) in done.stderr
    done = run_cli(*two, env=stand_ins | {"FAULT": "sft:1:die"})
    assert done.returncode == 1
    assert "sft: rank 1 was killed by SIGKILL" in done.stderr
    done = run_cli(*two, env=stand_ins)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        log = (tmp_path / "out" / "sft" / "logs" / f"rank{rank}.log").read_text()
        assert f"hello from sft rank {rank} threads" in log


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("signum", "processes"),
    [
        (signal.SIGINT, 1),
        (signal.SIGTERM, 1),
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_controller_leaves_no_orphans(
    tmp_path: Path,
    command: list[str],
    stand_ins: dict[str, str],
    repo_root: Path,
    signum: signal.Signals,
    processes: int,
) -> None:
    paths = os.pathsep.join([str(repo_root), stand_ins["PYTHONPATH"]])
    controller = subprocess.Popen(
        [
            *(sys.executable, "-m", "rlhf_app", *command),
            *("--set", f"deployment.num_processes={processes}"),
        ],
        cwd=tmp_path,
        env=dict(os.environ) | {"PYTHONPATH": paths, "FAULT": "sft:hang"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [tmp_path / "out" / "sft" / f"pid{rank}" for rank in range(processes)]
    try:
        wait_for(lambda: all(file.is_file() and file.read_text() for file in files))
        workers = [int(file.read_text()) for file in files]
        assert all(map(is_running, workers))
        controller.send_signal(signum)
        _, errors = controller.communicate(timeout=60)
    finally:
        controller.kill()
        controller.wait()
    wait_for(lambda: not any(map(is_running, workers)), seconds=40)
    if signum != signal.SIGKILL:
        assert controller.returncode == 3
        assert errors.startswith("rlhf: interrupted")
        assert statuses(tmp_path / "out") == {"sft": "failed"}


_LAUNCHER = """
import subprocess, sys, time
argv = [sys.executable, "-m", "rlhf_app.commands.worker", "out", "sft"]
subprocess.Popen(argv, start_new_session=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_dies_with_a_killed_launcher(
    run_cli: Run, tmp_path: Path, command: list[str], stand_ins: dict[str, str], repo_root: Path
) -> None:
    """As when torchrun is killed: its workers are in sessions of their own."""
    assert run_cli(*command, "--stages", "sft", env=stand_ins).returncode == 0
    paths = os.pathsep.join([str(repo_root), stand_ins["PYTHONPATH"]])
    env = {"PYTHONPATH": paths, "FAULT": "sft:hang", "RLHF_LOG_TO_FILES": "1"}
    env["OMP_NUM_THREADS"] = "1"
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER], cwd=tmp_path, env=dict(os.environ) | env
    )
    pid_file = tmp_path / "out" / "sft" / "pid0"
    try:
        wait_for(lambda: pid_file.is_file() and pid_file.read_text())
        worker = int(pid_file.read_text())
        assert is_running(worker)
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(lambda: not is_running(worker), seconds=10)
