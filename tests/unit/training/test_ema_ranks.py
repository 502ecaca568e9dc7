"""Averages of split weights: every ZeRO stage on two ranks against whole fp64 averages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("ema_worker.py")
CASES = [
    f"zero{stage} {dtype}{lora}"
    for stage in (0, 2, 3)
    for dtype in ("float32", "bfloat16")
    for lora in ("", " lora")
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_ranks):
    output = tmp_path_factory.mktemp("ema") / "results.pt"
    done = run_ranks(WORKER, output, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(output, weights_only=True)


@pytest.mark.parametrize("case", CASES)
def test_averaged_weights_equal_a_whole_fp64_average(results, case):
    result = results[case]
    assert result["undisturbed"]
    half = "bfloat16" in case
    for name, value in result["second"].items():
        # In bf16 both are roundings of nearly the same number: one unit in the last place.
        torch.testing.assert_close(
            result["averaged"][name], value, rtol=2**-7 if half else 1e-5, atol=1e-7, msg=name
        )
    for name, value in result["frozen"].items():
        if name != "lm_head.weight":
            assert torch.equal(result["averaged"][name], value), name
    tied = (result["averaged"][f"{key}.weight"] for key in ("lm_head", "model.embed_tokens"))
    assert torch.equal(*tied)
    assert any("lora_" in name for name in result["second"]) == ("lora" in case)


@pytest.mark.parametrize("case", CASES)
def test_distances_count_every_weight_once(results, case):
    expected = results[case]["expected"]
    assert results[case]["distances"] == pytest.approx(expected, rel=1e-4)
    assert 0 < expected["ema_distance"] < expected["sft_distance"]


@pytest.mark.parametrize("case", CASES)
def test_ranks_share_the_average(results, case):
    whole = "zero0 float32" in case  # the one kind without split masters
    trained = results[case]["trained"]
    for share in results[case]["shares"]:
        assert share == trained if whole else share < 0.6 * trained
