"""`rlhf verify` on CUDA: the path from training to rollouts and back, in graphs where possible."""

from __future__ import annotations

import json

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--dtype", "fp32"],
        ["--dtype", "fp16"],
        ["--zero-stage", "2"],
        ["--zero-stage", "3"],
        ["--lora-rank", "8"],
        ["--set", "hybrid_engine.release_inference_cache=true"],
    ],
    ids=lambda flags: " ".join(flags) or "bf16",
)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_verify_passes_with_graphs(family, flags, build, run_cli, tmp_path):
    build(family).save_pretrained(tmp_path / "model")
    done = run_cli("verify", "--json", "--model", str(tmp_path / "model"), *flags, timeout=300)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)
    assert rank["problems"] == []
    assert rank["route"] == "workspace"
    assert rank["form"] == "cuda graph"


@pytest.mark.parametrize("zero", ["0", "3"])
def test_unpinned_or_switched_off_it_says_why_it_is_eager(zero, build, run_cli, tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    setting = "pin_parameters" if zero == "3" else "enable_cuda_graph"
    done = run_cli(
        "verify", "--json", "--model", str(tmp_path / "model"), "--zero-stage", zero,
        "--set", f"hybrid_engine.{setting}=false", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)
    reason = {"0": "enable_cuda_graph is false", "3": "weights are gathered in every step"}[zero]
    assert rank["form"] == f"eager ({reason})"
