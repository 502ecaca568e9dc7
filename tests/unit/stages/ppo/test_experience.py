"""Layout of answers and log-probs of actions, against HF logits read by hand."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.ppo.evaluate import distinct_n
from stages.ppo.experience import lay_out
from stages.ppo.logprobs import policy_logprobs


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


PROMPTS = [[3, 4, 5], [6], [7, 8]]
RESPONSES = [[9, 2], [10, 11, 12, 2], []]


def test_layout():
    answers = lay_out(PROMPTS, RESPONSES)
    assert answers.input_ids_BL.tolist() == [[3, 4, 5, 9, 2], [6, 10, 11, 12, 2], [7, 8, 0, 0, 0]]
    assert answers.action_mask_BT.tolist() == [
        [True, True, False, False],
        [True, True, True, True],
        [False, False, False, False],
    ]
    assert answers.actions_BT.tolist() == [[9, 2, 0, 0], [10, 11, 12, 2], [0, 0, 0, 0]]
    assert answers.action_index_BT.tolist() == [[2, 3, 2, 2], [0, 1, 2, 3], [1, 1, 1, 1]]
    assert answers.last_index_B.tolist() == [4, 4, 1]
    assert answers.first_action_index == 0


def test_action_logprobs_equal_row_by_row_log_softmax(model):
    answers = lay_out(PROMPTS, RESPONSES)
    logprobs, entropy = policy_logprobs(model, answers, temperature=0.7, with_entropy=True)
    assert not logprobs[~answers.action_mask_BT].any()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0] / 0.7
        for t, token in enumerate(response):
            p = logits[len(prompt) + t - 1].softmax(-1)
            assert logprobs[row, t].item() == pytest.approx(p[token].log().item(), abs=1e-5)
            assert entropy[row, t].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-5)


def test_suppressed_tokens_leave_a_renormalised_support(model):
    answers = lay_out([[3, 4]], [[5, 6]])
    logits = model(answers.input_ids_BL).logits[:, 1:]
    logprobs, entropy = policy_logprobs(
        model, answers, temperature=1.0, suppress_ids=[2, 7], with_entropy=True
    )
    kept = [i for i in range(17) if i not in (2, 7)]
    p = logits[0, 0, kept].softmax(-1)
    assert logprobs[0, 0].item() == pytest.approx(p[kept.index(5)].log().item(), abs=1e-5)
    assert entropy[0, 0].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-5)


def test_one_row_batch():
    answers = lay_out([[1]], [[2]])
    assert answers.actions_BT.tolist() == [[2]]
    assert answers.at_last(torch.tensor([[5.0, 6.0]])).tolist() == [6.0]
    assert answers.at_actions(torch.tensor([[5.0, 6.0]])).tolist() == [[5.0]]


def test_distinct_n():
    # trigrams: abc bcd | abc | none -> {abc, bcd} of 3
    assert distinct_n([[1, 2, 3, 4], [1, 2, 3], [1, 2]]) == pytest.approx(2 / 3)
    assert distinct_n([[1]]) == 0.0
