"""The usual DeepSpeed script with one import changed, run as its users run it."""

import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# A process that tears the interpreter down while gloo's threads live may abort after all is done.
_LEAVE = """
import runpy, sys
from rlhf_app.commands.worker import leave
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
leave(0)
"""


@pytest.fixture
def example(repo_root, tmp_path):
    """Runs examples/hybrid_engine.py; the rewards of each rank."""

    def run(stage: int, ranks: int | None) -> dict[int, list[float]]:
        script = str(repo_root / "examples" / "hybrid_engine.py")
        config = json.loads((repo_root / "examples" / "ds_config.json").read_text())
        config["zero_optimization"]["stage"] = stage
        (tmp_path / "ds.json").write_text(json.dumps(config))
        (tmp_path / "leaving.py").write_text(_LEAVE)
        command = [sys.executable]
        if ranks is not None:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command += [str(tmp_path / "leaving.py")]
        done = subprocess.run(
            [*command, script, "--deepspeed_config", str(tmp_path / "ds.json")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        rewards: dict[int, list[float]] = {}
        for rank, reward in re.findall(r"rank (\d) step \d: reward (\d+\.\d+)", done.stdout):
            rewards.setdefault(int(rank), []).append(float(reward))
        return rewards

    return run


@pytest.mark.parametrize(("stage", "ranks"), [(0, None), (2, None), (0, 2), (2, 2)])
def test_the_example_learns(stage, ranks, example):
    """`python` alone and two ranks under torchrun; random answers have a reward of .5."""
    rewards = example(stage, ranks)
    assert sorted(rewards) == list(range(ranks or 1))
    for values in rewards.values():
        assert len(values) == 8
        assert abs(values[0] - 0.5) < 0.06
        assert values[-1] > values[0] + 0.1


def test_only_the_import_differs_from_a_deepspeed_script(repo_root):
    """Nothing of the script is ours but the name that it imports."""
    text = (repo_root / "examples" / "hybrid_engine.py").read_text()
    ours = [line for line in text.splitlines() if "rlhf" in line]
    assert len(ours) == 1
    assert ours[0].startswith("from rlhf_app.hybrid_engine import initialize")
    deepspeeds = text.replace("rlhf_app.hybrid_engine", "deepspeed")
    compile(deepspeeds, "example", "exec")
    import deepspeed

    assert callable(deepspeed.initialize)
