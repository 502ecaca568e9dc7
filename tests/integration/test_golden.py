"""The first 20 steps of each stage give the recorded numbers; refactors must not move them."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def golden(repo_root: Path):
    specification = importlib.util.spec_from_file_location(
        "golden_traces", repo_root / "scripts" / "golden_traces.py"
    )
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_first_steps_give_the_recorded_numbers(golden, tmp_path: Path):
    found = golden.gaps(golden.run_traces(tmp_path), golden.recorded())
    moved = {name: gap for name, gap in found.items() if gap[0] > 1}
    assert not moved, (
        f"(times the tolerance, step): {moved}. If the change is meant to move them, run "
        'scripts/golden_traces.py --record "why"'
    )


def test_a_gap_is_counted_in_tolerances(golden):
    steps = {
        stage: [dict.fromkeys(names, 2.0) for _ in range(golden.STEPS)]
        for stage, names in golden.TOLERANCES.items()
    }
    moved = {stage: [dict(step) for step in rows] for stage, rows in steps.items()}
    # 2.012 against 2: .012 where .004 (2e-3 of 2) is allowed.
    moved["ppo"][2]["reward"] = 2.012
    gap, step = golden.gaps(moved, steps)["ppo.reward"]
    assert gap == pytest.approx(3)
    assert step == 3
    assert golden.gaps(moved, steps)["sft.loss"] == (0, golden.STEPS)
    # Where runs may have parted, a thousand times as much.
    moved["ppo"][2]["reward"] = 2.0
    moved["ppo"][3]["reward"] = 2.012
    assert golden.gaps(moved, steps)["ppo.reward"] == (pytest.approx(0.003), 4)
