from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.distributed import Dist
from rlhf_app.training.micro_batches import BatchLimit
from stages.reward.evaluate import evaluate
from stages.reward.loss import final_token_loss

DIST = Dist(0, 0, 1, torch.device("cpu"))
ENGINE = SimpleNamespace(eval=lambda: None, train=lambda: None)


def measure(*chosen):
    """Evaluates pairs with these chosen scores, whose rejected scores are 0."""
    scores = torch.tensor(chosen)

    def loss_of(rows):
        picked = scores[rows]
        zeros = torch.zeros_like(picked)
        return final_token_loss(picked, zeros, zeros, torch.ones_like(picked))

    return evaluate(ENGINE, [1] * len(chosen), lambda rows: rows, loss_of, BatchLimit(1), DIST)


def test_by_hand():
    result = measure(2.0, -1.0)
    assert (result.accuracy, result.chosen, result.rejected, result.mean) == (0.5, 0.5, 0, 0.25)
    assert result.std == pytest.approx(math.sqrt(5 / 4 - 0.25**2))


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_one_score_that_is_not_finite_fails_the_evaluation(score):
    with pytest.raises(NonFiniteError, match="is not finite"):
        measure(2.0, score)
