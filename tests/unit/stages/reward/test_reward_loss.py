from __future__ import annotations

import math

import pytest
import torch

from data_sources.examples import PairExample, SequenceExample
from stages.reward.batches import collate, first_difference
from stages.reward.loss import final_token_loss, token_wise_loss

CPU = torch.device("cpu")


def nls(x: float) -> float:
    """-log sigmoid(x) from its definition."""
    return math.log(1 + math.exp(-x))


def pair(chosen, rejected, margin=0.0):
    return PairExample(
        "u",
        SequenceExample("u", chosen, 1, False),
        SequenceExample("u", rejected, 1, False),
        margin,
    )


def batch_of(pairs, use_margin=True):
    return collate(pairs, 0, CPU, limit=64, use_margin=use_margin, filler=pair([7, 8], [7, 9], 3.0))


def t(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def test_equal_scores_cost_log_2():
    loss, sums = final_token_loss(t(1.5, 0.0), t(1.5, 0.0), t(0, 0), t(1, 1))
    assert loss.item() == pytest.approx(2 * math.log(2), rel=1e-6)
    assert sums["correct"].item() == 0, "a tie is not a correct ranking"
    assert sums["margin"].item() == 0


def test_by_hand():
    loss, sums = final_token_loss(t(3.0, -1.0, 5.0), t(1.0, 2.0, 9.0), t(0.5, 0, 0), t(1, 1, 0))
    assert loss.item() == pytest.approx(nls(3 - 1 - 0.5) + nls(-1 - 2), rel=1e-6)
    assert {k: v.item() for k, v in sums.items()} == {
        "correct": 1, "margin": 2 - 3, "chosen": 2, "rejected": 3, "squares": 9 + 1 + 1 + 4,
    }  # fmt: skip


def test_centring_by_hand():
    loss, _ = final_token_loss(t(3.0), t(1.0), t(0.0), t(1.0), center_coef=0.01)
    assert loss.item() == pytest.approx(nls(2) + 0.01 * 16, rel=1e-6)


def test_gradient_raises_chosen_and_lowers_rejected():
    chosen, rejected = t(0.0).requires_grad_(), t(0.0).requires_grad_()
    final_token_loss(chosen, rejected, t(0.0), t(1.0))[0].backward()
    assert chosen.grad.item() == pytest.approx(-0.5)
    assert rejected.grad.item() == pytest.approx(0.5)


def test_token_wise_by_hand():
    # chosen has tokens 0..2, rejected 0..4; they part at 1. Later chosen scores are padding.
    chosen = t([1.0, 2.0, 3.0, 99.0, 99.0])
    rejected = t([1.0, 0.0, 1.0, 5.0, 4.0])
    loss, sums = token_wise_loss(
        chosen, rejected, t(2, dtype=torch.long), t(4, dtype=torch.long),
        t(1, dtype=torch.long), t(0.0), t(1.0),
    )  # fmt: skip
    expected = (nls(2 - 0) + nls(3 - 1) + nls(3 - 5) + nls(3 - 4)) / 4
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert (sums["chosen"].item(), sums["rejected"].item()) == (3, 4)


def test_token_wise_weighs_pairs_alike_whatever_their_length():
    chosen, rejected = torch.zeros(2, 6), torch.zeros(2, 6)
    last = t(1, 5, dtype=torch.long)
    loss, _ = token_wise_loss(
        chosen, rejected, last, last, t(1, 1, dtype=torch.long), t(0, 0), t(1, 1)
    )
    assert loss.item() == pytest.approx(2 * math.log(2), rel=1e-6)


def test_token_wise_ignores_padding():
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = torch.randn(2, 1, 9, generator=generator).unbind()
    args = (t(5, dtype=torch.long), t(3, dtype=torch.long), t(2, dtype=torch.long), t(0.0), t(1.0))
    before, _ = token_wise_loss(chosen, rejected, *args)
    chosen[:, 6:], rejected[:, 4:] = 1e4, -1e4
    after, _ = token_wise_loss(chosen, rejected, *args)
    assert after.item() == before.item()


def test_filler_pairs_cost_nothing_and_count_nothing():
    batch = batch_of([])
    assert batch.weight_B.tolist() == [0.0]
    scores = torch.ones(2, 2, requires_grad=True)
    last_c, last_r = batch.last_2B.chunk(2)
    for loss, sums in (
        final_token_loss(scores[:1, 1], scores[1:, 0], batch.margin_B, batch.weight_B, 0.01),
        token_wise_loss(
            scores[:1], scores[1:], last_c, last_r, batch.first_B, batch.margin_B, batch.weight_B
        ),
    ):
        assert loss.item() == 0
        assert all(value.item() == 0 for value in sums.values())
        (grad,) = torch.autograd.grad(loss, scores)
        assert not grad.any()


def test_batch_layout():
    batch = batch_of([pair([5, 6, 7], [5, 8], 0.5), pair([5, 6], [5, 6, 9, 9])])
    assert batch.input_ids_2BT.tolist() == [
        [5, 6, 7, 0], [5, 6, 0, 0], [5, 8, 0, 0], [5, 6, 9, 9],
    ]  # fmt: skip
    assert batch.last_2B.tolist() == [2, 1, 1, 3]
    assert batch.first_B.tolist() == [1, 2]
    assert batch.margin_B.tolist() == [0.5, 0.0]
    assert batch.weight_B.tolist() == [1.0, 1.0]
    assert batch_of([pair([5, 6], [5, 7], 0.5)], use_margin=False).margin_B.tolist() == [0.0]


def test_a_padding_id_inside_a_row_does_not_move_the_score():
    assert batch_of([pair([5, 0, 0], [5, 6])]).last_2B.tolist() == [2, 1]


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([4], [5, 6]) == 0
    assert first_difference([1, 2], [1, 2, 3]) == 2
