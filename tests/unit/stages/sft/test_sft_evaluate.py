from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.distributed import Dist
from rlhf_app.training.micro_batches import BatchLimit
from stages.sft.evaluate import evaluate

DIST = Dist(0, 0, 1, torch.device("cpu"))
ENGINE = SimpleNamespace(eval=lambda: None, train=lambda: None)


def measure(*losses):
    """Evaluates rows of one token each with these losses."""

    def batch_of(indices):
        return SimpleNamespace(rows=indices, mask_BT=torch.ones(len(indices), 1))

    def loss_of(batch):
        return torch.tensor(losses)[batch.rows].sum(), {"correct": torch.tensor(1)}

    return evaluate(ENGINE, [2] * len(losses), batch_of, loss_of, BatchLimit(1), DIST)


def test_by_hand():
    result = measure(1.0, 3.0)
    assert (result.loss, result.correct, result.tokens) == (2.0, 2.0, 2.0)
    assert result.perplexity == pytest.approx(math.exp(2))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_fails_the_evaluation(loss):
    with pytest.raises(NonFiniteError, match="loss is not finite"):
        measure(1.0, loss)
