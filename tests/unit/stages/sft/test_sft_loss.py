from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_sources.examples import SequenceExample, target_tokens
from rlhf_app.training.cross_entropy import TokenBatch, cross_entropy
from stages.sft.batches import collate

CPU = torch.device("cpu")
PAD = EOS = 2


def example(ids, start, truncated=False):
    return SequenceExample("u", ids, start, truncated)


def batch_of(rows, loss_on="response"):
    return collate(rows, loss_on, PAD, CPU, limit=64, filler=example([5, 6], 1))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=EOS,
        )
    )


def loss_of_logits(logits, targets, mask):
    """The loss of a model with these logits; `logits[b, t]` predicts `targets[b, t]`."""

    def model(logits_to_keep, **_):
        return SimpleNamespace(logits=padded[:, -logits_to_keep:])

    padded = torch.cat([logits, logits.new_zeros(len(logits), 1, logits.shape[-1])], 1)
    ids = torch.nn.functional.pad(targets, (1, 0))
    return cross_entropy(model, TokenBatch(ids, torch.nn.functional.pad(mask, (1, 0))))


def hf_loss(model, row, loss_on="response"):
    """transformers' own loss of one row alone, as a sum."""
    ids = torch.tensor([row.input_ids])
    labels = ids.clone()
    labels[:, : row.response_start if loss_on == "response" else 0] = -100
    mean = model(input_ids=ids, labels=labels).loss
    return mean * int((labels[:, 1:] != -100).sum())


def test_uniform_logits_cost_log_v_per_token():
    logits = torch.zeros(2, 3, 7)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    loss, sums = loss_of_logits(logits, torch.zeros(2, 3, dtype=torch.long), mask)
    assert loss.item() == pytest.approx(3 * math.log(7), rel=1e-6)
    assert sums["correct"].item() == 3  # argmax of a tie is the first id, the target


def test_one_token_by_hand():
    logits = torch.tensor([[[1.0, 2.0, 4.0], [9.0, 0.0, 0.0]]])
    loss, sums = loss_of_logits(logits, torch.tensor([[1, 0]]), torch.tensor([[True, False]]))
    expected = math.log(math.exp(1) + math.exp(2) + math.exp(4)) - 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert sums["correct"].item() == 0


def test_bf16_logits_are_summed_in_fp32():
    logits = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets, mask = torch.arange(5)[None], torch.ones(1, 5, dtype=torch.bool)
    loss, _ = loss_of_logits(logits, targets, mask)
    exact, _ = loss_of_logits(logits.double().float(), targets, mask)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("loss_on", ["response", "all"])
def test_equals_the_loss_of_transformers_row_by_row(model, loss_on):
    rows = [
        example([1, 7, 8, 9, 10, EOS], 3),
        example([1, 7, EOS], 2),
        example([1, 4, 5, 6, 7, 8, 9, 10, 11, EOS], 1),
    ]
    loss, _ = cross_entropy(model, batch_of(rows, loss_on))
    expected = sum(hf_loss(model, row, loss_on) for row in rows)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_batch_of_one(model):
    row = example([1, 7, 8, EOS], 2)
    loss, _ = cross_entropy(model, batch_of([row]))
    assert loss.item() == pytest.approx(hf_loss(model, row).item(), rel=1e-6)


def test_complaint_peers1_dsc8_eos_carries_loss_once_though_it_is_the_padding():
    rows = [example([1, 7, 8, EOS], 2), example([1, 7, 8, 9, 10, 11, EOS], 2)]
    batch = batch_of(rows)
    labelled = batch.input_ids_BT[batch.mask_BT]
    assert labelled.tolist() == [8, EOS, 8, 9, 10, 11, EOS]
    assert batch.input_ids_BT[0].tolist() == [1, 7, 8, EOS, PAD, PAD, PAD]


def test_an_eos_in_the_prompt_carries_no_loss():
    batch = batch_of([example([EOS, 7, EOS, 8, EOS], 3)])
    assert batch.mask_BT.tolist() == [[False, False, False, True, True]]


def test_an_empty_answer_is_its_stop_token_alone(model):
    row = example([1, 7, 8, EOS], 3)
    batch = batch_of([row])
    assert batch.mask_BT.tolist() == [[False, False, False, True]]
    assert target_tokens(row, "response") == 1
    loss, _ = cross_entropy(model, batch)
    logits = model(input_ids=torch.tensor([row.input_ids])).logits[0, 2]
    assert loss.item() == pytest.approx(-logits.log_softmax(-1)[EOS].item(), rel=1e-5)


def test_the_first_token_is_never_a_target():
    assert target_tokens(example([5, 6, 7], 0), "response") == 2
    assert target_tokens(example([5, 6, 7], 2), "all") == 2
    batch = batch_of([example([5, 6, 7], 0)])
    assert batch.mask_BT.tolist() == [[False, True, True]]


def test_every_assistant_turn_carries_loss_as_in_transformers(model):
    """Labels of transformers' own loss, -100 outside of both turns."""
    row = SequenceExample("u", [1, 7, 8, EOS, 9, 10, 11, EOS], 6, False, earlier=((2, 4),))
    other = example([1, 4, 5, EOS], 2)
    batch = batch_of([row, other], "assistant_turns")
    assert batch.mask_BT[0].tolist() == [i in (2, 3, 6, 7) for i in range(8)]
    assert target_tokens(row, "assistant_turns") == 4
    assert target_tokens(row, "response") == 2
    ids = torch.tensor([row.input_ids])
    labels = torch.where(batch.mask_BT[:1], ids, -100)
    expected = 4 * model(input_ids=ids, labels=labels).loss + hf_loss(model, other)
    loss, _ = cross_entropy(model, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_filler_batch_has_no_loss_but_gradients_of_zero(model):
    batch = batch_of([])
    assert not batch.mask_BT.any()
    loss, sums = cross_entropy(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert sums["correct"].item() == 0
    # Also through the trunk, so that every rank takes part in every reduction.
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    model.zero_grad()


def test_only_the_logits_that_matter_are_computed(model):
    rows = [example([1, 7, 8, 9, 10, EOS], 4), example([1, 7, 8, 9, EOS], 3)]
    batch = batch_of(rows)
    assert batch.logits_needed == 4  # positions 2, 3, 4 predict targets; 5 predicts nothing
    assert batch_of([example([1, 7, EOS], 1)]).logits_needed == 3
    all_logits = model(input_ids=batch.input_ids_BT).logits
    full, _ = loss_of_logits(all_logits[:, :-1], batch.input_ids_BT[:, 1:], batch.mask_BT[:, 1:])
    assert cross_entropy(model, batch)[0].item() == pytest.approx(full.item(), rel=1e-6)
