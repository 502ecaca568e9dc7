"""Adapters under DeepSpeed: the base never changes, in any ZeRO stage, over many cycles."""

from __future__ import annotations

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("lora_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cycles", "stages"),
    [(1, 50, ["0", "2", "3", "2b"]), (2, 50, ["2", "3"])],
)
def test_the_base_is_the_same_after_50_cycles(ranks, cycles, stages, run_ranks):
    """Rollouts fused and unfused in turn, the reference by adapters off, and training.

    DeepSpeed's hybrid engine adds and subtracts the adapters, and its ZeRO-3 runs end in
    "still have inflight params" after some cycles.
    """
    done = run_ranks(WORKER, cycles, *stages, ranks=ranks, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in done.stdout.splitlines() if line.startswith("ok")]
    assert said == [f"ok {stage}" for stage in stages]
