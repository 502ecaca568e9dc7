"""What follows from the raw seconds of a row."""

from dataclasses import replace

import pytest

from rlhf_app.report.bench_generate import EngineRun, HFRun, Limit, Row, StepSplit

ENGINE = EngineRun(
    prefill_seconds=1.0, decode_seconds=4.0, total_seconds=5.0, all_seconds=[5.0],
    first_seconds=9.0, generated_tokens=100, decode_tokens=90, decode_steps=30, slots=4,
    form="cuda graph", peak_bytes=1, workspace_bytes=1,
)  # fmt: skip
LIMIT = Limit(kv_seconds=1.0, gemm_seconds=2.0, weight_seconds=0.5, prefill_seconds=0.5, steps=25)


def test_rates():
    row = Row(10, 4, ENGINE, LIMIT, HFRun(seconds=20.0), ideal_steps=25)
    assert row.rates() == {
        "tokens_per_second": 20.0,
        "limit_tokens_per_second": pytest.approx(100 / 3.5),
        "fraction": pytest.approx(3.5 / 5),
        "floor_tokens_per_second": 50.0,
        "floor_fraction": 0.4,
        "slot_utilisation": 0.75,
        "decode_tokens_per_second": 22.5,
        "limit_decode_tokens_per_second": 30.0,
        "decode_fraction": 0.75,
        "ideal_slot_utilisation": 0.9,
        "hf_tokens_per_second": 5.0,
        "ratio_to_hf": 4.0,
    }


def test_native_generation_has_no_rate_of_decode_alone():
    rates = Row(10, 4, replace(ENGINE, form="native"), LIMIT).rates()
    assert "fraction" in rates
    assert not {name for name in rates if "decode" in name}


def test_nothing_follows_from_a_failure():
    assert Row(10, 4, error="10 rows: out of memory").rates() == {}


def test_what_no_kernel_fills():
    split = StepSplit({"GEMM": 0.25, "other": 0.5}, step_seconds=1.0, steps=4, kernels=[])
    assert split.between == 0.25
    assert replace(split, step_seconds=0.5).between == 0.0
