"""Golden traces: the numbers of the first 20 steps of each stage, to hold refactors to.

    .venv/bin/python scripts/golden_traces.py                      # compare, print the largest gaps
    .venv/bin/python scripts/golden_traces.py --record "REASON"    # record them again

A change that should not change results must leave the traces as they are. One that should (a new
default, another order of random numbers) records them again; the reason is kept beside the numbers
and belongs into the commit message too.

The run is the embedded task on one CPU thread, in fp32 and without compiled decode. One CPU repeats
it bit for bit; another kind rounds sums differently, by less than a tenth of the tolerances (seen
between AVX-512, AVX2 and neither). In PPO such a difference flips a sampled token some time, and
then the runs part: from the fourth update on only a wide band is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "tests" / "data" / "golden"
STEPS = 20
STAGES = ("sft", "reward", "ppo")
#: Metrics of each stage, and the difference to the recorded number that is still the same run:
#: |new - old| <= tolerance * max(1, |old|).
TOLERANCES: dict[str, dict[str, float]] = {
    "sft": {"loss": 1e-5, "grad_norm": 1e-4},
    "reward": {"loss": 2e-4, "grad_norm": 1e-3, "margin": 5e-4},
    "ppo": {
        "loss": 1e-5,
        "value_loss": 2e-3,
        "grad_norm": 1e-3,
        "kl_per_answer": 1e-4,
        "reward": 2e-3,
    },
}
#: Steps that the tolerances hold for, and how much wider they are afterwards.
TIGHT_STEPS = {"sft": STEPS, "reward": STEPS, "ppo": 3}
LATER = {"loss": 1e4, "value_loss": 1e3, "grad_norm": 1e3, "kl_per_answer": 2e4, "reward": 1e3}
SETTINGS = (
    "sft.max_steps=20",
    "reward.max_steps=20",
    "ppo.updates=20",
    "ppo.rollout_batch_size=64",
    "ppo.micro_batch_size=16",
    # Small steps, and an epsilon above the noise of the smallest gradients: tokens flip late.
    "ppo.actor.learning_rate=5e-5",
    "ppo.actor.eps=1e-5",
    "ppo.critic.learning_rate=1e-4",
    "ppo.critic.eps=1e-5",
    "ppo.eval_prompts=16",
    "ppo.samples=0",
    "sft.samples=0",
    "hybrid_engine.compile_decode=false",
)
Trace = dict[str, list[dict[str, float]]]


def run_traces(folder: Path, settings: tuple[str, ...] = (), **environment: str) -> Trace:
    """Train the three stages for 20 steps each.

    Args:
        folder: of the run, empty.
        settings: further `--set` values.
        environment: variables of the processes.

    Returns:
        For each stage the chosen metrics of every step.

    Raises:
        RuntimeError: the run failed.
    """
    command = [sys.executable, "-m", "rlhf_app", "train", "--seed", "7"]
    command += ["--deployment-type", "cpu", "--output-dir", str(folder / "out")]
    for setting in (*SETTINGS, *settings):
        command += ["--set", setting]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | environment
    done = subprocess.run(  # noqa: S603 - a list of arguments, no shell
        command, cwd=folder, env=variables, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return {stage: _read(folder / "out" / stage / "metrics.jsonl", stage) for stage in STAGES}


def _read(path: Path, stage: str) -> list[dict[str, float]]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    names = TOLERANCES[stage]
    return [{name: row[name] for name in names} for row in rows if row["kind"] == "train"]


def gaps(new: Trace, old: Trace) -> dict[str, tuple[float, int]]:
    """For each `stage.metric` the largest difference in tolerances, and its step from 1."""
    found = {}
    for stage, tolerances in TOLERANCES.items():
        assert len(new[stage]) == len(old[stage]) == STEPS, stage
        for name, tolerance in tolerances.items():
            shares = []
            for step, (a, b) in enumerate(zip(new[stage], old[stage], strict=True), start=1):
                wider = 1.0 if step <= TIGHT_STEPS[stage] else LATER[name]
                allowed = tolerance * wider * max(1.0, abs(b[name]))
                shares.append((abs(a[name] - b[name]) / allowed, step))
            found[f"{stage}.{name}"] = max(shares)
    return found


def recorded() -> Trace:
    """The traces in the repository."""
    return {stage: json.loads((FOLDER / f"{stage}.json").read_text())["steps"] for stage in STAGES}


def record(trace: Trace, reason: str) -> None:
    """Replace the traces in the repository."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for stage, steps in trace.items():
        path = FOLDER / f"{stage}.json"
        reasons = json.loads(path.read_text())["reasons"] if path.exists() else []
        lines = ",\n    ".join(json.dumps(step) for step in steps)
        history = ",\n    ".join(json.dumps(known) for known in [*reasons, reason])
        path.write_text(
            f'{{\n  "reasons": [\n    {history}\n  ],\n  "steps": [\n    {lines}\n  ]\n}}\n'
        )


def main() -> int:
    """Compare with the recorded traces, or record them again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", metavar="REASON", help="replace the recorded traces")
    chosen = parser.parse_args()
    if chosen.record is not None and len(chosen.record.split()) < 3:
        parser.error("--record: say why the numbers change, in a sentence")
    with tempfile.TemporaryDirectory() as folder:
        trace = run_traces(Path(folder))
    if chosen.record is not None:
        record(trace, chosen.record)
        print(f"recorded {STEPS} steps of {', '.join(STAGES)} in {FOLDER}")
        return 0
    found = gaps(trace, recorded())
    for name, (gap, step) in found.items():
        print(f"{name:24} {gap:8.3f} of the tolerance, at step {step}")
    return int(max(gap for gap, _ in found.values()) > 1)


if __name__ == "__main__":
    sys.exit(main())
