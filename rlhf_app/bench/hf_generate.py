"""transformers' own generate on the same work, for comparison."""

from __future__ import annotations

import time
from statistics import median_low
from typing import Any

import torch
from transformers import GenerationConfig

from rlhf_app.bench.limits import ModelCost
from rlhf_app.bench.step_split import seconds_of
from rlhf_app.hybrid_engine import SamplingParams
from rlhf_app.hybrid_engine.kv_workspace import free_bytes
from rlhf_app.hybrid_engine.memory_use import memory_use, reset_peak
from rlhf_app.hybrid_engine.temporarily import temporarily
from rlhf_app.report.bench_generate import HFRun

# Repeats end when they have taken this long: the comparison need not be as exact.
_ENOUGH_SECONDS = 10.0
# Copies of the logits, in fp32, that its sampling holds at once.
_LOGIT_COPIES = 6


def run_hf(
    model: Any, prompts: list[list[int]], params: SamplingParams, cost: ModelCost, repeats: int
) -> HFRun:
    """Times `generate` with its dynamic cache: same prompts, same lengths, no end of answer.

    Args:
        model: a causal LM; its mode is restored.
        prompts: of one length.
        params: how tokens are drawn.
        cost: the model's, for an estimate of the memory.
        repeats: at most this many, after one that sets up.
    """
    device = model.device
    run = HFRun(skipped=_does_not_fit(model, prompts, params, cost))
    if run.skipped:
        return run
    ids = torch.tensor(prompts, device=device)
    training = [module for module in model.modules() if module.training]
    with torch.no_grad(), temporarily(training, "training", False):
        # At full length: its cache takes new memory at every step, and the first time that
        # memory comes from the driver.
        _generate(model, ids, params, params.max_new_tokens)
        reset_peak(device)
        began = time.perf_counter()
        while len(run.all_seconds) < repeats:
            seconds, output = seconds_of(
                lambda: _generate(model, ids, params, params.max_new_tokens), device
            )
            assert output.shape[1] == ids.shape[1] + params.max_new_tokens
            run.all_seconds.append(seconds)
            if time.perf_counter() - began > _ENOUGH_SECONDS:
                break
        run.peak_bytes = memory_use(device)[1]
    run.seconds = median_low(run.all_seconds)
    return run


def _generate(model: Any, ids: torch.Tensor, params: SamplingParams, tokens: int) -> torch.Tensor:
    drawn = {} if params.greedy else {
        "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p,
    }  # fmt: skip
    output: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            max_new_tokens=tokens,
            do_sample=not params.greedy,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
            **drawn,
        ),
    )
    return output


def _does_not_fit(
    model: Any, prompts: list[list[int]], params: SamplingParams, cost: ModelCost
) -> str:
    """Why it would run out of memory, by what it allocates at least; else nothing."""
    if model.device.type != "cuda":
        return ""
    rows, longest = len(prompts), len(prompts[0]) + params.max_new_tokens
    # The dynamic cache grows by copying a layer.
    caches = rows * cost.kv_bytes(longest) * (1 + 1 / len(cost.layers))
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    wanted = int(caches + rows * vocabulary * 4 * _LOGIT_COPIES)
    free = free_bytes(model.device)
    return "" if wanted < free else f"its cache and logits need {wanted} bytes, {free} are free"
