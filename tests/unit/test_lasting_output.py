"""A run outlives whoever reads what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys
from rlhf_app.lasting_output import lasting_output
with lasting_output():
    print("first", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        print("nobody reads this", flush=True)
        print("nor this", file=sys.stderr)
sys.exit(3)
"""


def test_a_reader_that_left_is_no_error(repo_root: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        cwd=repo_root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stderr.close()
    process.stdin.write("go\n")
    process.stdin.close()
    assert process.wait(timeout=20) == 3
