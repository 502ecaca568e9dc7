import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A start takes many seconds, and one start runs many checks.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("tp_worker.py")


@pytest.fixture(scope="module")
def run(run_ranks):
    """Start the worker once for several checks; the time limit is the proof that none hangs."""

    def start(ranks, *checks):
        done = run_ranks(WORKER, *checks, ranks=ranks, timeout=500)
        assert done.returncode == 0, done.stderr[-6000:]
        return re.findall(r"^ok (\w+)", done.stdout, re.MULTILINE)

    return start


@pytest.fixture(scope="module")
def two_ranks(run):
    """The checks that passed: one start for all of them, as starting takes longest."""
    return run(
        2, "dsc07_left_padded_generate", "dsc21_soak", "dsc22_ranks_that_stop_apart", "errors",
        "first_rank_decides", "fallbacks", "bytes", "more_families", "zero3",
    )  # fmt: skip


def test_families_roll_out_in_slices_as_whole(run):
    """Tokens and log-probs of 13 families, greedy and sampled, before and after an update."""
    assert run(2, "zero0") == ["zero0"]


def test_more_families_roll_out_in_slices_as_whole(two_ranks):
    assert "more_families" in two_ranks


def test_slices_of_zero3_roll_out_as_whole(two_ranks):
    assert "zero3" in two_ranks


def test_dsc07_generate_shares_left_padded_rows_by_their_masks(two_ranks):
    assert "dsc07_left_padded_generate" in two_ranks


def test_dsc21_fifty_switches_under_zero3(two_ranks):
    assert "dsc21_soak" in two_ranks


def test_dsc22_ranks_that_stop_at_different_lengths_do_not_hang(two_ranks):
    assert "dsc22_ranks_that_stop_apart" in two_ranks


def test_errors_end_the_call_on_every_rank(two_ranks):
    assert "errors" in two_ranks


def test_ranks_follow_the_draws_of_the_first(two_ranks):
    assert "first_rank_decides" in two_ranks


def test_what_cannot_be_sliced_runs_whole_with_one_warning(two_ranks):
    assert "fallbacks" in two_ranks


def test_planned_bytes_are_those_held(two_ranks):
    assert "bytes" in two_ranks


def test_two_groups_of_two_and_one_of_four(run):
    assert run(4, "groups") == ["groups"]


def test_a_rank_lost_in_the_middle_ends_the_run():
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            str(WORKER), "lost_rank",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    after = time.time() - max(map(float, re.findall(r"failing at ([\d.]+)", done.stdout)))
    assert done.returncode != 0
    assert "RuntimeError: lost in this test" in done.stderr
    assert after < 60
