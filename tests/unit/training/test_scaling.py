"""The same parameters after k SGD steps for any ranks, ZeRO stage and micro-batch size.

The reference is plain autograd, one row at a time and without padding. SGD, not Adam: Adam
divides by the gradient's size and would hide a wrong scale.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

WORKER = Path(__file__).with_name("scaling_worker.py")
KINDS = ("micro1", "micro2", "micro8", "tokens4", "tokens21", "tokens60")
CASES = [f"zero{stage} {kind}" for stage in (0, 2, 3) for kind in KINDS]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worker():
    spec = importlib.util.spec_from_file_location("scaling_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=[1, 2])
def results(request, tmp_path_factory, run_ranks):
    output = tmp_path_factory.mktemp("scaling") / "results.pt"
    done = run_ranks(WORKER, output, ranks=request.param)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(output, weights_only=True)


def reference(worker, clip, times=1.0):
    model = worker.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=worker.LR)
    losses = []
    for _ in range(worker.STEPS):
        total, count = 0.0, 0
        for row in worker.rows():
            ids = torch.tensor([row.input_ids])
            logits = model(input_ids=ids).logits[0, row.response_start - 1 : -1]
            total = total + F.cross_entropy(logits, ids[0, row.response_start :], reduction="sum")
            count += len(row.input_ids) - row.response_start
        (times * total / count).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    return model.state_dict(), losses


@pytest.mark.parametrize("case", [*CASES, *(f"zero{stage} clipped" for stage in (0, 2, 3))])
def test_complaint_peers6_peers7_every_split_equals_plain_autograd(worker, results, case):
    expected, losses = reference(worker, 0.25 if "clipped" in case else 0.0)
    start = worker.model().state_dict()
    assert results[case]["losses"] == pytest.approx(losses, rel=1e-6)
    for name, value in results[case]["state"].items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6, msg=name)
    moved = max((results[case]["state"][n] - start[n]).abs().max() for n in start)
    assert moved > 1e-2, "the steps must be large enough to tell scales apart"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_added_objective_is_one_more_term(worker, results, stage):
    """The rows a second time at weight 0.5: 1.5 times the gradient, and the loss of the first."""
    expected, losses = reference(worker, 0.0, times=1.5)
    result = results[f"zero{stage} added"]
    assert result["losses"] == pytest.approx(losses, rel=1e-6)
    for name, value in result["state"].items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=3e-6, msg=name)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("loss", ("the loss is not finite (nan) on 1 of ",)),
        ("gradient", ("the gradient norm is not finite",)),
        ("text", ("the ptx loss is not finite (nan) on 1 of ",)),
    ],
)
def test_complaint_dsc6_peers15_one_rank_gone_wrong_stops_all_untouched(
    worker, results, stage, what, words
):
    """One rank's NaN reached the others through the gradient and then every weight (DSE, trl).

    A rank that stopped by itself would leave the others waiting in the next collective.
    """
    result = results[f"zero{stage} poisoned {what}"]
    start = worker.model().state_dict()
    assert len(set(result["errors"])) == 1
    assert all(word in result["errors"][0] for word in words)
    for name, value in result["state"].items():
        assert torch.equal(value, start[name])
