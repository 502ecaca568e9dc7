"""Scores of answers by the training forward, against logits of each row alone."""

from __future__ import annotations

import pytest
import torch

from rlhf_app.hybrid_engine import SamplingParams
from rlhf_app.hybrid_engine.training_scores import Answered, training_logprobs

PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]
ANSWERS = [[12, 13], [14, 15, 16], [17]]


def answered():
    params = SamplingParams(3, temperature=0.7, suppress_ids=(3,))
    return Answered(PROMPTS, ANSWERS, [torch.zeros(len(a)) for a in ANSWERS], params, [False] * 3)


def expected(model):
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].double() / 0.7
        logits[:, 3] = -torch.inf
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        yield rows[torch.arange(len(answer)), torch.tensor(answer)]


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "gemma2"])
@torch.no_grad()
def test_equals_each_row_alone_and_the_head_sees_answers_only(family, build):
    model = build(family)
    want = list(expected(model))
    seen = []
    head = model.get_output_embeddings()
    with head.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[:-1])):
        got = training_logprobs(model, answered())
    assert seen == [(1, 6)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert not head._forward_pre_hooks


@torch.no_grad()
def test_a_model_that_names_no_head_gives_all_logits(build, monkeypatch):
    model = build("llama")
    want = list(expected(model))
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    for a, b in zip(training_logprobs(model, answered()), want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
