from __future__ import annotations

import subprocess
import sys

import pytest

from rlhf_app.training.deepspeed_module import plain_arch_list


@pytest.mark.parametrize(
    ("given", "plain"),
    [("9.0a", "9.0"), ("8.6;9.0a+PTX", "8.6;9.0+PTX"), ("10.0f 9.0", "10.0 9.0"), ("8.0", "8.0")],
)
def test_architecture_letters_go(given, plain):
    assert plain_arch_list(given) == plain


@pytest.mark.slow
def test_import_is_quiet_and_survives_a_lettered_architecture(repo_root):
    code = (
        "import os; os.environ['TORCH_CUDA_ARCH_LIST'] = '9.0a'; "
        "from rlhf_app.training.distributed import setup, close; setup(); close(); "
        "setup(); close(); print(os.environ['TORCH_CUDA_ARCH_LIST'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "9.0\n"
    assert done.stderr == ""
