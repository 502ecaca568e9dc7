"""Adapters under DeepSpeed: the base never changes, in any ZeRO stage, over many cycles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("lora_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cycles", "stages"),
    [(1, 50, ["0", "2", "3", "2b"]), (2, 50, ["2", "3"])],
)
def test_the_base_is_the_same_after_50_cycles(ranks, cycles, stages):
    """Rollouts fused and unfused in turn, the reference by adapters off, and training.

    DeepSpeed's hybrid engine adds and subtracts the adapters, and its ZeRO-3 runs end in
    "still have inflight params" after some cycles.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), str(WORKER), str(cycles), *stages],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in done.stdout.splitlines() if line.startswith("ok")]
    assert said == [f"ok {stage}" for stage in stages]
