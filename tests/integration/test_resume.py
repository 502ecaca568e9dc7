"""Runs that are killed, stopped or damaged end as if nothing had been.

The comparison is always with an undisturbed run of the same settings: artifacts byte for byte,
every metric of every step, results and samples.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.interruptions import (
    command,
    finish,
    left_over,
    outcome,
    start,
    steps_done,
    wait_for,
    workers,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_ZERO = ("sft.zero_stage", "reward.zero_stage", "ppo.actor.zero_stage", "ppo.critic.zero_stage")
_RICH = {
    "sft.keep_best": "loss",
    "reward.keep_best": "accuracy",
    "ppo.keep_best": "reward",
    "ppo.kl_controller": "adaptive",
    "ppo.kl_horizon": 50,
    "ppo.ema_decay": 0.9,
    "ppo.ptx_coef": 0.5,
}
# Name -> settings, processes.
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "whole": (_RICH, 1),
}
MORE_VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "zero3, two ranks, adapters": (dict.fromkeys(_ZERO, 3) | {"lora.rank": 4} | _RICH, 2),
    "zero0, two ranks": ({}, 2),
    "zero2, two ranks": (dict.fromkeys(_ZERO, 2), 2),
    "zero3": (dict.fromkeys(_ZERO, 3), 1),
    "zero3, two ranks": (dict.fromkeys(_ZERO, 3), 2),
    "adapters": ({"lora.rank": 4} | _RICH, 1),
    "zero2, two ranks, adapters": (dict.fromkeys(_ZERO, 2) | {"lora.rank": 4} | _RICH, 2),
    "bf16, zero2, two ranks": (dict.fromkeys(_ZERO, 2) | {"model.dtype": "bf16"} | _RICH, 2),
    "bf16, zero3": (dict.fromkeys(_ZERO, 3) | {"model.dtype": "bf16"} | _RICH, 1),
}


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """A test that fails in the middle leaves no run behind."""
    yield
    for process in left_over(tmp_path):
        process.kill()


def start_until(argv: list[str], out: Path, steps: int) -> subprocess.Popen[str]:
    """Starts a run of SFT and waits until it has made some steps."""
    process = start(argv)
    assert wait_for(process, lambda: steps_done(out, "sft") >= steps)
    return process


def kill(process: subprocess.Popen[str]) -> None:
    """The controller alone: what it started must go with it."""
    process.kill()
    process.wait()


def check_resume(
    small_run: list[str], tmp_path: Path, settings: dict[str, Any], ranks: int
) -> None:
    settings = settings | {"deployment.num_processes": ranks}
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    code, output = finish(command(undisturbed, settings, *small_run))
    assert code == 0, output
    for stage, step in (("sft", 5), ("reward", 5), ("ppo", 3)):
        process = start(command(disturbed, settings, *small_run))
        assert wait_for(process, lambda s=stage, n=step: steps_done(disturbed, s) >= n)
        kill(process)
    code, output = finish(command(disturbed, settings, *small_run))
    assert code == 0, output
    assert "ppo: goes on from its checkpoint, after step" in output
    expected, found = outcome(undisturbed), outcome(disturbed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == value, name
    assert not list(disturbed.rglob("checkpoints"))
    assert not list(disturbed.rglob(".*.new"))


@pytest.mark.parametrize("name", VARIANTS)
def test_complaint_dse850_dsc5_trl1643_peers16_a_killed_run_goes_on_to_the_same_bits(
    small_run: list[str], tmp_path: Path, name: str
) -> None:
    check_resume(small_run, tmp_path, *VARIANTS[name])


@pytest.mark.campaign
@pytest.mark.parametrize("name", MORE_VARIANTS)
def test_so_do_more_kinds_of_runs(small_run: list[str], tmp_path: Path, name: str) -> None:
    check_resume(small_run, tmp_path, *MORE_VARIANTS[name])


# One stage with more steps, for what does not depend on the stage.
_SFT = {"stages": ["sft"], "sft.epochs": 8, "sft.max_steps": 120, "sft.eval_every": 0}


@pytest.fixture(scope="module")
def undisturbed(small_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an SFT stage of 120 steps comes to."""
    out = tmp_path_factory.mktemp("sft") / "run"
    code, output = finish(command(out, _SFT, *small_run))
    assert code == 0, output
    return outcome(out)


@pytest.fixture
def run(small_run: list[str], tmp_path: Path) -> tuple[Path, list[str]]:
    """A directory, and the command of that stage in it."""
    out = tmp_path / "run"
    return out, command(out, _SFT, *small_run)


def test_ctrl_c_stops_with_a_checkpoint_and_the_same_command_goes_on(
    run: tuple[Path, list[str]], undisturbed: dict[str, Any]
) -> None:
    out, argv = run
    argv = [*argv, "--set=checkpoint.every_steps=null", "--set=checkpoint.every_minutes=null"]
    process = start_until(argv, out, 5)
    process.send_signal(signal.SIGUSR1)  # a checkpoint, and on
    assert wait_for(process, lambda: list(out.glob("sft/checkpoints/step_*")) != [])
    seen = steps_done(out, "sft")
    assert wait_for(process, lambda: steps_done(out, "sft") > seen)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert "SIGINT: stopping after this step, with a checkpoint" in output
    assert "rlhf: stopped after step" in output
    assert "Traceback" not in output
    assert left_over(out) == []
    done = steps_done(out, "sft")
    code, output = finish([*argv, "--dry-run"])
    assert "sft: not finished, would go on from its checkpoint" in output
    code, output = finish([*argv[:4], "--resume", str(out)])
    assert code == 0, output
    assert f"sft: goes on from its checkpoint, after step {done} of 120" in output
    assert outcome(out) == undisturbed


def test_a_run_outlives_its_terminal_and_heeds_a_scheduler(
    run: tuple[Path, list[str]], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    out, argv = run
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does, for the run to inherit
    try:
        process = start(argv)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert wait_for(process, lambda: steps_done(out, "sft") >= 3)
    process.send_signal(signal.SIGHUP)
    assert process.stdout is not None
    process.stdout.close()
    seen = steps_done(out, "sft")
    assert wait_for(process, lambda: steps_done(out, "sft") >= seen + 3)
    for one in (*workers(process), process):  # as Slurm does
        one.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 3
    assert left_over(out) == []
    done = steps_done(out, "sft")
    code, output = finish([*argv[:4], "--resume", "run"], directory=tmp_path)
    assert code == 0, output
    assert f"sft: goes on from its checkpoint, after step {done} of 120" in output
    assert outcome(out) == undisturbed


def test_a_second_ctrl_c_stops_at_once(run: tuple[Path, list[str]]) -> None:
    out, argv = run
    process = start_until(argv, out, 3)
    (worker,) = workers(process)
    worker.suspend()  # so that it cannot stop as asked
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert time.monotonic() - began < 20
    assert left_over(out) == []


def test_a_worker_started_by_hand_hears_signals(run: tuple[Path, list[str]]) -> None:
    out, argv = run
    process = start_until(argv, out, 3)
    kill(process)
    worker = start([argv[0], "-m", "rlhf_app.commands.worker", str(out), "sft"])
    before = steps_done(out, "sft")
    assert wait_for(worker, lambda: steps_done(out, "sft") > before)
    worker.send_signal(signal.SIGTERM)
    output, _ = worker.communicate(timeout=60)
    assert worker.returncode == 3, output
    assert "checkpoint of step" in output


@pytest.mark.parametrize(
    "hurt",
    [
        "flipped",
        "poisoned",
        pytest.param("cut", marks=pytest.mark.campaign),
        pytest.param("no index", marks=pytest.mark.campaign),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_serves(
    run: tuple[Path, list[str]], undisturbed: dict[str, Any], hurt: str, tmp_path: Path
) -> None:
    out, argv = run
    process = start_until(argv, out, 9)
    kill(process)
    newest = max(out.glob("sft/checkpoints/step_*"))
    file = max(newest.rglob("*.pt"), key=lambda path: path.stat().st_size)
    if hurt == "no index":
        (newest / "checkpoint.json").write_text("{")
    elif hurt == "poisoned":
        torch.save(Poison(str(tmp_path / "ran")), file)
    else:
        content = bytearray(file.read_bytes())
        content = content[: len(content) // 2] if hurt == "cut" else content
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
    code, output = finish(argv)
    assert code == 0, output
    assert "is damaged" in output
    assert f"damaged_{newest.name}" in output
    assert not (tmp_path / "ran").exists()
    assert outcome(out) == undisturbed


class Poison:
    """Runs a command when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_what_does_not_fit_a_checkpoint_is_refused_and_nothing_is_lost(
    run: tuple[Path, list[str]], undisturbed: dict[str, Any]
) -> None:
    out, argv = run
    process = start_until(argv, out, 5)
    code, output = finish(argv)
    assert code == 2
    assert "another rlhf is running there" in output
    kill(process)
    for extra, reason in (
        ("--set=sft.learning_rate=0.5", "sft.learning_rate"),
        ("--set=deployment.num_processes=2", "number of processes 1 -> 2"),
    ):
        code, output = finish([*argv, extra])
        assert code == 2, output
        assert reason in output
        assert "has a checkpoint of step" in output
        assert "--force" in output
    code, output = finish(argv)
    assert code == 0, output
    assert "goes on from its checkpoint" in output
    assert outcome(out) == undisturbed


def test_a_hung_rank_ends_the_run(small_run: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = _SFT | {"deployment.num_processes": 2, "deployment.hang_minutes": 0.1}
    process = start_until(command(out, settings, *small_run), out, 3)
    workers(process)[1].suspend()
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    assert "no worker has moved for 0.1 minutes: rank 1 is stopped" in output
    assert "File " in (out / "sft" / "logs" / "rank0.log").read_text()  # where it waited
    assert left_over(out) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
def test_a_full_disk_costs_checkpoints_or_the_run_but_nothing_that_was_saved(
    small_run: list[str], tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["/bin/mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a file system")
    try:
        out = small / "run"
        argv = command(out, _SFT, *small_run)
        process = start_until(argv, out, 5)
        kill(process)
        # Not enough for another checkpoint, enough for logs: training goes on without.
        free = shutil.disk_usage(small).free
        filler = small / "filler"
        filler.write_bytes(b"\0" * (free - (2 << 20)))
        process = start_until(argv, out, 60)
        process.send_signal(signal.SIGTERM)  # which finds no room for a last one
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 3, output
        assert "could not be written. The same command goes on after step" in output
        log = (out / "sft" / "logs" / "rank0.log").read_text()
        assert "no checkpoint of step" in log
        assert "free space" in log
        # Not enough for the artifact either.
        free = shutil.disk_usage(small).free
        filler.open("ab").write(b"\0" * (free - 30_000))
        code, output = finish(argv)
        assert code == 1, output
        assert "no space left" in output.lower()
        assert "Traceback" not in output
        filler.unlink()
        code, output = finish(argv)
        assert code == 0, output
        assert "goes on from its checkpoint" in output
        assert outcome(out) == undisturbed
    finally:
        subprocess.run(["/bin/umount", "-l", str(small)], check=True)
