"""The scripts in launch/ set the topology and pass everything else on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("script", "env", "expected"),
    [
        ("single_gpu.sh", {}, "train --deployment-type single_gpu"),
        ("single_node.sh", {}, "train --deployment-type single_node"),
        (
            "single_node.sh",
            {"NUM_GPUS": "4"},
            "train --deployment-type single_node --set deployment.num_processes=4",
        ),
    ],
)
def test_arguments(
    repo_root: Path, tmp_path: Path, script: str, env: dict[str, str], expected: str
) -> None:
    done = subprocess.run(
        [str(repo_root / "launch" / script), "--output-dir", "my run"],
        cwd=tmp_path,
        env=dict(os.environ) | {"RLHF": "echo"} | env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{expected} --output-dir my run\n"


def test_every_script_is_tested_and_executable(repo_root: Path) -> None:
    scripts = sorted((repo_root / "launch").glob("*.sh"))
    assert [script.name for script in scripts] == ["single_gpu.sh", "single_node.sh"]
    assert all(os.access(script, os.X_OK) for script in scripts)
