"""Runs whose processes are killed again and again, at moments drawn by a seed.

Whatever dies - the controller, or one of the ranks - and whenever - while starting, training,
evaluating, writing a checkpoint or an artifact - the same command must bring the run to the
end of an undisturbed one, byte for byte, and leave no process behind.

    pytest -m campaign tests/integration/test_fault_campaign.py -s    # all of it, with its table
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.interruptions import (
    STAGES,
    command,
    finish,
    left_over,
    outcome,
    start,
    steps_done,
    wait_for,
    workers,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# Checkpoints, evaluations and artifacts at every step, so that many kills fall on one.
SETTINGS: dict[str, Any] = {
    "checkpoint.every_steps": 1,
    "sft.max_steps": 5,
    "sft.eval_every": 1,
    "sft.keep_best": "loss",
    "reward.max_steps": 5,
    "reward.eval_every": 1,
    "reward.keep_best": "loss",
    "ppo.updates": 4,
    "ppo.eval_every": 1,
    "ppo.keep_best": "reward",
    "ppo.ema_decay": 0.9,
}
_STEPS = 5 + 5 + 4
MOMENTS = ("any", "checkpoint", "artifact")
_LONGEST_WAIT = 0.4  # seconds after a step, about what one of these takes


@pytest.fixture(scope="module")
def undisturbed(
    small_run: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """What an undisturbed run comes to, by number of ranks."""
    known: dict[int, dict[str, Any]] = {}

    def of(ranks: int) -> dict[str, Any]:
        if ranks not in known:
            out = tmp_path_factory.mktemp("undisturbed") / "run"
            settings = SETTINGS | {"deployment.num_processes": ranks}
            code, output = finish(command(out, settings, *small_run))
            assert code == 0, output
            known[ranks] = outcome(out)
        return known[ranks]

    return of


def kill_once(draw: random.Random, argv: list[str], out: Path, ranks: int) -> str | None:
    """Starts the command and kills one of its processes; None where it ended before.

    Returns:
        What was killed, and when.
    """
    moment = draw.choice(MOMENTS)
    target = draw.choice(["controller", *(f"rank {rank}" for rank in range(ranks))])
    done = sum(steps_done(out, stage) for stage in STAGES)
    ahead = draw.randint(0, max(0, _STEPS - done - 1))
    wait = draw.uniform(0, _LONGEST_WAIT)
    process = start(argv)
    try:
        # A resumed stage first drops what came after its checkpoint: one step may not be enough.
        reached = wait_for(
            process, lambda: sum(steps_done(out, stage) for stage in STAGES) >= done + ahead
        )
        if moment == "checkpoint":
            reached = reached and wait_for(
                process, lambda: any(out.glob("*/checkpoints/.step_*.new/*"))
            )
        elif moment == "artifact":
            reached = reached and wait_for(process, lambda: any(out.glob("*/.*.new/*")))
        else:
            time.sleep(wait)
        victims = {f"rank {rank}": worker for rank, worker in enumerate(workers(process))}
        victim = victims.get(target, process)
        if not reached or process.poll() is not None:
            return None
        stage = next((s for s in reversed(STAGES) if (out / s).is_dir()), "start")
        victim.kill()
        name = "controller" if victim is process else target
        process.wait(timeout=120)
        return f"{name}, {stage}, {moment}"
    finally:
        process.kill()
        process.communicate()


def campaign(
    small_run: list[str], out: Path, expected: dict[str, Any], *, seed: int, ranks: int, kills: int
) -> list[str]:
    """One run, killed several times and then left alone; what was killed, and when."""
    draw = random.Random(seed)
    argv = command(out, SETTINGS | {"deployment.num_processes": ranks}, *small_run)
    killed: list[str] = []
    for _ in range(kills):
        what = kill_once(draw, argv, out, ranks)
        if what is None:
            break
        killed.append(what)
        wait_until_gone(out)
    code, output = finish(argv)
    assert code == 0, f"after {killed}: {output}"
    found = outcome(out)
    assert found.keys() == expected.keys(), killed
    for name, value in expected.items():
        assert found[name] == value, f"{name} after {killed}"
    return killed


def wait_until_gone(out: Path) -> None:
    """No process outlives its run by more than a moment."""
    end = time.monotonic() + 45
    while left_over(out):
        assert time.monotonic() < end, left_over(out)
        time.sleep(0.1)


def test_six_kills_change_nothing(small_run: list[str], undisturbed, tmp_path: Path) -> None:
    killed: list[str] = []
    for seed in range(10):
        out = tmp_path / f"run{seed}"
        left = 6 - len(killed)
        killed += campaign(small_run, out, undisturbed(1), seed=seed, ranks=1, kills=left)
        if len(killed) == 6:
            break
    assert len(killed) == 6, killed
    print("\n".join(killed))


@pytest.mark.campaign
def test_sixty_kills_change_nothing(small_run: list[str], undisturbed, tmp_path: Path) -> None:
    killed: list[str] = []
    runs = 0
    while len(killed) < 60:
        ranks = 1 + runs % 2
        out = tmp_path / f"run{runs}"
        killed += campaign(
            small_run, out, undisturbed(ranks), seed=100 + runs, ranks=ranks, kills=5
        )
        runs += 1
        print(f"{runs} runs, {len(killed)} kills", flush=True)
    for what, count in sorted(Counter(killed).items()):
        print(f"{count:3d}  {what}")
    print(f"{runs} runs, {len(killed)} kills, every run ended like an undisturbed one")
