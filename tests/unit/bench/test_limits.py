"""Limits of generation against hand-worked numbers and a published table."""

import random

import pytest

from rlhf_app.bench.limits import (
    LayerCost,
    Machine,
    ModelCost,
    decode_limit,
    fixed_decode_limit,
    ideal_rows,
    prefill_seconds,
    varied_decode_limit,
)
from rlhf_app.hybrid_engine.refill import ideal_refill

# OPT-1.3B in bf16: 24 layers of 12 h^2 weights in matrices (h = 2048), 4 h + h biases of query,
# key, value and output, 4 h + h of the MLP and 4 h of two norms, a final norm, and a tied output
# embedding of 50,272 rows. Its input and position rows are looked up.
_H = 2048
_LAYER = 12 * _H**2 + 4 * _H + 5 * _H + 4 * _H
OPT = ModelCost(
    weight_bytes=2 * (24 * _LAYER + 2 * _H + 50_272 * _H),
    layer_weights=24 * 12 * _H**2,
    head_weights=50_272 * _H,
    layers=(LayerCost(kv_bytes=2 * 2 * _H, width=_H),) * 24,
)
TINY = ModelCost(
    weight_bytes=1000,
    layer_weights=300,
    head_weights=100,
    layers=(LayerCost(kv_bytes=10, width=8), LayerCost(kv_bytes=10, width=8, window=4)),
)
MACHINE = Machine(bandwidth=500.0, peak=2000.0)


@pytest.mark.parametrize(("rows", "published"), [(32, 26_400), (128, 43_400), (512, 51_700)])
def test_the_plain_limit_of_opt_1_3b_at_4_16_tb_per_second(rows, published):
    limit = fixed_decode_limit(OPT, Machine(4.16e12, 790e12), rows, prompt=256, answer=256)
    assert rows * 255 / limit.reading_seconds == pytest.approx(published, rel=3e-3)


def test_the_sharper_limit_bounds_large_batches_by_arithmetic():
    """512 rows x 2 FLOPs x 1.311e9 weights / 790 TFLOP/s = 1.699 ms, reading takes .631 ms."""
    limit = fixed_decode_limit(OPT, Machine(4.16e12, 790e12), 512, prompt=256, answer=256)
    assert limit.gemm_seconds / 255 == pytest.approx(1.699e-3, rel=1e-3)
    assert limit.weight_seconds / 255 == pytest.approx(0.6306e-3, rel=1e-3)
    # Mean live length 256 + (1 + 255) / 2 = 384; 512 x 384 x 196,608 bytes.
    assert limit.kv_seconds / 255 == pytest.approx(512 * 384 * 196_608 / 4.16e12, rel=1e-12)


def test_a_fixed_batch_by_hand():
    """Prompt 3, answers of 3 tokens: two steps that see 4 and 5 tokens, and 4 in the window.

    KV of a row: 10 x (4 + 5) + 10 x (4 + 4) = 170 bytes. GEMMs: max(1000 / 500, 2 x rows x 400 /
    2000), so 2 s up to 5 rows.
    """
    limit = fixed_decode_limit(TINY, MACHINE, 4, prompt=3, answer=3)
    assert limit.kv_seconds == pytest.approx(4 * 170 / 500)
    assert limit.gemm_seconds == limit.weight_seconds == 4.0
    limit = fixed_decode_limit(TINY, MACHINE, 10, prompt=3, answer=3)
    assert limit.gemm_seconds == pytest.approx(2 * 4.0)
    assert limit.weight_seconds == 4.0
    assert limit.seconds == pytest.approx(10 * 170 / 500 + 8)
    assert limit.reading_seconds == pytest.approx(10 * 170 / 500 + 4)


def test_one_token_needs_no_decode_step():
    limit = fixed_decode_limit(TINY, MACHINE, 4, prompt=3, answer=1)
    assert limit.seconds == limit.reading_seconds == 0


def test_prefill_by_hand():
    """Prompt 5: GEMMs 2 x (5 x 300 + 100). Attention sees 1 + 2 + 3 + 4 + 5 tokens in the first
    layer and 1 + 2 + 3 + 4 + 4 in the second: 4 x 8 x (15 + 14)."""
    assert TINY.forward_flops(5, 1) == 3200 + 928
    assert prefill_seconds(TINY, MACHINE, 2, 5) == pytest.approx(2 * 4128 / 2000)


def test_windows_against_addition():
    layer = LayerCost(kv_bytes=1, width=1, window=7)
    for first in range(1, 12):
        for last in range(first - 1, 15):
            assert layer.seen_between(first, last) == sum(min(n, 7) for n in range(first, last + 1))


def test_the_ideal_refill_by_hand():
    """Two slots; answers of 4, 2, 3, 1, 2 tokens take 3, 1, 2, 0, 1 steps."""
    assert ideal_rows([4, 2, 3, 1, 2], 2) == [2, 2, 2, 1]
    assert ideal_rows([4, 2, 3, 1, 2], 8) == [4, 2, 1]
    assert ideal_rows([1, 1], 2) == []


def test_the_ideal_refill_does_all_work_in_as_many_steps_as_the_engine_aims_at():
    source = random.Random(0)
    for _ in range(50):
        answers = [source.randint(1, 30) for _ in range(source.randint(1, 40))]
        slots = source.randint(1, 12)
        rows = ideal_rows(answers, slots)
        assert sum(rows) == sum(answers) - len(answers)
        assert len(rows) == ideal_refill(answers, slots)
        assert max(rows, default=0) <= slots


def test_varied_lengths_that_are_equal_are_a_fixed_batch():
    assert varied_decode_limit(OPT, MACHINE, 16, [9] * 8, 8) == fixed_decode_limit(
        OPT, MACHINE, 8, 16, 9
    )


def test_a_schedule_by_hand():
    """Answers of 3 and 1 and 2 tokens, prompt 1, one slot: steps see 2, 3 and 2 tokens."""
    limit = varied_decode_limit(TINY, MACHINE, 1, [3, 1, 2], 1)
    assert limit.kv_seconds == pytest.approx((2 + 3 + 2) * 20 / 500)
    assert limit.gemm_seconds == pytest.approx(3 * 2.0)
    assert limit == decode_limit(TINY, MACHINE, [1, 1, 1], 140)
