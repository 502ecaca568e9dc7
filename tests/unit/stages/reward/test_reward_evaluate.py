from __future__ import annotations

import math

import pytest
import torch

from data_sources.examples import PairExample, SequenceExample
from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.distributed import Dist
from rlhf_app.training.micro_batches import BatchLimit
from stages.reward.batches import collate
from stages.reward.evaluate import evaluate
from stages.reward.loss import final_token_loss

CPU = torch.device("cpu")
DIST = Dist(0, 0, 1, CPU)


class Engine:
    """Scores a prefix by its last token, from a table."""

    def __init__(self, table):
        self.table = torch.tensor(table)

    def __call__(self, input_ids):
        return self.table[input_ids]

    def eval(self):
        pass

    train = eval


def pair(chosen, rejected, chosen_length=2, rejected_length=2):
    """Answers that end with these tokens, after a prompt of one token."""
    rows = [[0] * length + [last] for last, length in
            ((chosen, chosen_length), (rejected, rejected_length))]  # fmt: skip
    return PairExample("", *(SequenceExample("", row, 1, False) for row in rows), 0.0)


def measure(table, pairs, rows=1, dist=DIST):
    """Evaluates pairs of tokens, whose scores are in the table."""

    def batch_of(chosen):
        used = [pairs[row] for row in chosen]
        return collate(used, 0, CPU, limit=64, use_margin=True, filler=pairs[0])

    def loss_of(batch, scores_2BT):
        return final_token_loss(*batch.at_last(scores_2BT), batch.margin_B, batch.weight_B)

    return evaluate(Engine(table), [1] * len(pairs), batch_of, loss_of, BatchLimit(rows), dist)


def test_by_hand():
    result = measure([0.0, 2.0, -1.0], [pair(1, 0), pair(2, 0)])
    assert (result.accuracy, result.chosen, result.rejected, result.mean) == (0.5, 0.5, 0, 0.25)
    assert result.std == pytest.approx(math.sqrt(5 / 4 - 0.25**2))


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_one_score_that_is_not_finite_fails_the_evaluation(score):
    with pytest.raises(NonFiniteError, match="is not finite"):
        measure([0.0, 2.0, score], [pair(1, 0), pair(2, 0)])


def logit(p):
    return math.log(p / (1 - p))


def test_complaint_dsc13_calibration_by_a_hand_table():
    """Confidences .62, .63, .97 and one tie, in bins of width .05.

    .60-.65: both right, confidences .62 and .63: abs(2 - 1.25) = .75
    .95-1.0: none right of one: .97
    .50-.55: a tie is half right at confidence .5: 0
    """
    table = [0.0, logit(0.62), logit(0.63), logit(0.97)]
    pairs = [pair(1, 0), pair(2, 0), pair(0, 3), pair(0, 0)]
    for rows in (1, 2, 4):
        assert measure(table, pairs, rows).calibration == pytest.approx((0.75 + 0.97) / 4)


def test_a_calibrated_model_has_no_error():
    """At margin logit(.75), three of four pairs in the right order."""
    pairs = [pair(1, 0), pair(1, 0), pair(1, 0), pair(0, 1)]
    assert measure([0.0, logit(0.75)], pairs).calibration == pytest.approx(0.0, abs=1e-7)
    # Ten times too sure of itself: sigmoid(10 x) is all but 1.
    sure = measure([0.0, 10 * logit(0.75)], pairs).calibration
    assert sure == pytest.approx(1 / (1 + 3**-10) - 0.75, abs=1e-6)


def test_complaint_dsc13_accuracy_by_length_and_baselines_by_hand():
    right, wrong = (1, 0), (0, 1)
    pairs = [
        pair(*right, 5, 2), pair(*right, 5, 2), pair(*wrong, 5, 2),  # chosen longer: 2 of 3
        pair(*wrong, 2, 5), pair(0, 0, 2, 5),  # chosen shorter: 0 of 2, a tie is not right
        pair(*right, 3, 3),
    ]  # fmt: skip
    result = measure([0.0, 1.0], pairs, rows=4)
    assert result.accuracy == pytest.approx(3 / 6)
    assert result.accuracy_chosen_longer == pytest.approx(2 / 3)
    assert result.accuracy_chosen_shorter == 0.0
    assert result.longer_wins == pytest.approx((3 + 0.5) / 6)
    assert result.shorter_wins == pytest.approx((2 + 0.5) / 6)


def test_complaint_dsc13_score_length_correlation_is_torchs():
    lengths, last = [2, 7, 3, 5, 4, 6], [1, 2, 3, 4, 5, 6]
    table = [0.0, 0.3, -1.2, 2.0, 0.1, 0.9, -0.4]
    pairs = [pair(last[i], last[i + 1], lengths[i], lengths[i + 1]) for i in (0, 2, 4)]
    expected = torch.corrcoef(torch.tensor([[table[i] for i in last], lengths]))[0, 1].item()
    result = measure(table, pairs, rows=2)
    assert result.score_length_correlation == pytest.approx(expected, abs=1e-6)


def test_what_no_pair_can_tell_is_none():
    result = measure([0.0, 1.0], [pair(1, 0, 3, 3)])
    assert result.accuracy_chosen_longer is None
    assert result.accuracy_chosen_shorter is None
    assert result.score_length_correlation is None
    assert (result.longer_wins, result.shorter_wins) == (0.5, 0.5)


def test_fillers_of_idle_ranks_count_nothing(monkeypatch):
    """Three ranks, two pairs: the ranks' sums, added up, are those of one rank alone."""
    pairs = [pair(1, 0, 4, 2), pair(0, 2, 2, 5)]
    table = [0.0, 1.5, 0.5]
    parts = []

    def gather(dist, values):
        parts.append(values)
        return [1.0] * len(values)

    expected = measure(table, pairs)
    monkeypatch.setattr(Dist, "sum", gather)
    for rank in range(3):
        measure(table, pairs, dist=Dist(rank, rank, 3, CPU))
    total = [sum(column) for column in zip(*parts, strict=True)]
    monkeypatch.setattr(Dist, "sum", lambda dist, values: total)
    assert vars(measure(table, pairs)) == pytest.approx(vars(expected))
