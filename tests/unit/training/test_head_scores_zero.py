"""Log-probs in the place of the head under ZeRO on two ranks, against one process and autograd."""

from __future__ import annotations

import importlib.util
from itertools import chain
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("head_scores_worker.py")
CASES = [
    f"{model} zero{stage} {block_bytes}"
    for model in ("llama", "llama-tied", "opt")
    for stage, block_bytes in ((0, 250), (0, 1 << 20), (2, 250), (3, 250))
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worker():
    spec = importlib.util.spec_from_file_location("head_scores_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_ranks):
    output = tmp_path_factory.mktemp("head_scores") / "results.pt"
    done = run_ranks(WORKER, output, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(output, weights_only=True)


def reference(worker, name):
    """The same steps row by row, from transformers' logits."""
    model = worker.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=worker.LR)
    prompts = [*chain(*worker.PROMPTS)]
    responses = [*chain(*worker.RESPONSES)]
    for _ in range(worker.STEPS):
        total = torch.zeros(())
        for prompt, response in zip(prompts, responses, strict=True):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0]
            scaled = logits / worker.TEMPERATURE
            scaled = scaled.index_fill(1, torch.tensor(worker.SUPPRESSED), -torch.inf)
            for t, token in enumerate(response):
                logprobs = scaled[len(prompt) + t - 1].log_softmax(-1)
                possible = logprobs[logprobs > -torch.inf]
                entropy = -(possible.exp() * possible).sum()
                # Actions of a rank's longest answer: four; of the other rank there are none.
                total = total + worker.weights(4)[t] * logprobs[token] + worker.ENTROPY * entropy
        (total / worker.TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_plain_autograd(worker, results, case):
    name = case.split()[0]
    expected, start = reference(worker, name), worker.build(name).state_dict()
    for key, value in results[case]["state"].items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=2e-6, msg=key)
    moved = max((expected[key] - start[key]).abs().max() for key in start)
    assert moved > 1e-2, "the steps must be large enough to tell scales apart"


@pytest.mark.parametrize("case", CASES)
def test_the_head_is_replaced_and_the_first_ratio_is_1(worker, results, case):
    assert results[case]["calls"] == [[7] * 2 * worker.STEPS, [0] * 2 * worker.STEPS]
    assert results[case]["ratio_is_1"] == [True, True]
