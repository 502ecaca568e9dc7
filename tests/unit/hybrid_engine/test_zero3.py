"""Rollouts of a model that ZeRO-3 has split over two ranks, next to plain torch.

All checks run in one pair of processes (starting one takes longer than most checks); each test
here asks for the outcome of one. They are in zero3_worker.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rlhf_app.hybrid_engine.deepspeed_hooks import suspended
from rlhf_app.hybrid_engine.zero3 import decoder_layers

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("zero3_worker.py")
pytestmark = pytest.mark.timeout(600)
BOTH = pytest.mark.parametrize("weights", ["pinned", "unpinned"])


@pytest.fixture(scope="module")
def passed():
    """Names of the checks that both ranks passed, and what the processes wrote."""
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            str(WORKER),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok ")]
    return names, done.stderr[-4000:]


def assert_passed(outcome, name):
    names, errors = outcome
    assert name in names, errors


@pytest.mark.slow
@BOTH
def test_tokens_are_those_of_zero_0_and_the_memory_comes_back(passed, weights):
    assert_passed(passed, f"tokens-{weights}")


@pytest.mark.slow
@BOTH
def test_complaint_dsc21_no_weights_in_flight_over_100_switches_with_lora(passed, weights):
    """ "still have inflight params" or "already in registry" after some 14 steps."""
    assert_passed(passed, f"soak-{weights}")


@pytest.mark.slow
@BOTH
def test_complaint_dsc22_peers18_ranks_that_stop_at_different_lengths(passed, weights):
    """Generating hung: one rank waited for weights that the others no longer asked for."""
    assert_passed(passed, f"lengths-{weights}")


@pytest.mark.slow
def test_complaint_dsc26_native_generate_of_a_split_model(passed):
    assert_passed(passed, "native")


@pytest.mark.slow
@BOTH
def test_only_deepspeeds_hooks_rest(passed, weights):
    assert_passed(passed, f"hooks-{weights}")


@pytest.mark.slow
@BOTH
def test_an_error_in_a_forward_gives_the_memory_back(passed, weights):
    assert_passed(passed, f"exception-{weights}")


@pytest.mark.slow
@BOTH
def test_complaint_dsc22_what_one_rank_needs_native_generate_for(passed, weights):
    """Ranks waited for each other in gathers of different weights."""
    assert_passed(passed, f"native_on_one_rank-{weights}")


@pytest.mark.slow
@BOTH
def test_an_error_of_one_ranks_request_is_one_of_all_ranks(passed, weights):
    assert_passed(passed, f"requests_apart-{weights}")


@pytest.mark.slow
@BOTH
def test_a_rank_that_fails_in_the_middle_keeps_no_other_waiting(passed, weights):
    assert_passed(passed, f"failure_on_one_rank-{weights}")


@pytest.mark.slow
def test_unpinned_weights_are_whole_one_group_at_a_time(passed):
    assert_passed(passed, "streaming")


@pytest.mark.slow
def test_complaint_dsc27_an_actor_loads_after_rollouts(passed):
    assert_passed(passed, "saving")


def test_suspended_hooks_return_to_their_places():
    module = nn.Linear(1, 1)
    fired: list[str] = []

    def register(name):
        return module.register_forward_hook(lambda *_: fired.append(name))

    first, ours, leaving, last = (register(name) for name in ("first", "ours", "leaving", "last"))
    with suspended([ours]), suspended([ours]):
        module(torch.ones(1))
        leaving.remove()
        register("new")
    assert fired == ["first", "leaving", "last"]
    fired.clear()
    module(torch.ones(1))
    assert fired == ["first", "ours", "last", "new"]
    assert [first.id, ours.id, last.id] == list(module._forward_hooks)[:3]
    ours.remove()
    with suspended([ours]):
        pass
    assert ours.id not in module._forward_hooks


def test_decoder_layers_are_the_largest_list(build):
    mixtral, gpt2 = build("mixtral"), build("gpt2")
    assert decoder_layers(mixtral) == list(mixtral.model.layers)
    assert decoder_layers(gpt2) == list(gpt2.transformer.h)
    assert decoder_layers(nn.Linear(2, 2)) == []
