"""Rollouts through transformers' own generate, for models the workspace cannot serve.

Shapes: B rows, P prompt tokens, T answer tokens, V vocabulary.

Slower, but with the same randomness, log-probs and stop rules: a logits processor draws the
token and leaves transformers only that one to pick.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rlhf_app.hybrid_engine.capability import keeps_state
from rlhf_app.hybrid_engine.decode import Rollout, RolloutTimings
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.positions import batch_dependent_from
from rlhf_app.hybrid_engine.rounding import tolerance
from rlhf_app.hybrid_engine.sampling import Sampler, SamplingParams, request_keys, uniforms
from rlhf_app.hybrid_engine.temporarily import temporarily

# Per model, whether the rows of a batch influence each other.
_MIXED: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def native_rollout(
    model: InferenceModel,
    prompts: Sequence[Sequence[int]],
    uids: Sequence[int],
    params: SamplingParams,
    limits: Sequence[int],
    slots: int,
) -> Rollout:
    """Answer every prompt, `slots` at a time: left-padded, or where padding would change a
    row's answer, in batches of one length; one by one where rows change each other's.

    Args:
        model: the model; its mode is restored.
        prompts: ids of each request, none empty.
        uids: one integer per request.
        params: how tokens are drawn.
        limits: most tokens of each request's answer.
        slots: rows of one batch.

    Returns:
        What `DecodeLoop.run` returns; `prefill_seconds` is 0, as it is not seen apart.
    """
    start = time.perf_counter()
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[torch.Tensor] = [torch.empty(0) for _ in prompts]
    steps = row_steps = later_steps = 0
    with model.evaluation(whole=True), _plain_generation_config(model.model):
        if keeps_state(model) and slots > 1 and _rows_mix(model):
            slots = 1
        for batch in _batches(prompts, slots, ragged=_takes_padding(model)):
            keys = request_keys(params.seed, params.step, [uids[i] for i in batch])
            longest = replace(params, max_new_tokens=max(limits[i] for i in batch))
            drawn_BT, drawn_logprobs_BT = _generate(
                model, [prompts[i] for i in batch], keys, longest
            )
            rows = zip(batch, drawn_BT.tolist(), drawn_logprobs_BT.cpu(), strict=True)
            for index, row, values in rows:
                count = _answer_length(row[: limits[index]], params.stop_ids)
                tokens[index] = row[:count]
                logprobs[index] = values[:count].clone()
            steps += drawn_BT.shape[1]
            row_steps += drawn_BT.numel()
            later_steps += drawn_BT.shape[1] - 1
    total = time.perf_counter() - start
    return Rollout(
        tokens,
        logprobs,
        [answer[-1] in params.stop_ids for answer in tokens],
        RolloutTimings(
            prefill_seconds=0.0,
            decode_seconds=total,
            total_seconds=total,
            prompt_tokens=sum(map(len, prompts)),
            generated_tokens=sum(map(len, tokens)),
            decode_steps=steps,
            row_steps=row_steps,
            slot_steps=later_steps * slots,
            slot_tokens=sum(map(len, tokens)) - len(tokens),
        ),
    )


def _takes_padding(model: InferenceModel) -> bool:
    """Whether a left-padded row is answered as it is alone."""
    # Padding counts as positions where none are taken, runs through a recurrent state, or
    # decides when a table of positions changes.
    return (
        model.takes_positions
        and not keeps_state(model)
        and batch_dependent_from(model.text_config) is None
    )


def _rows_mix(model: InferenceModel) -> bool:
    """Whether a row decoded in a batch is answered unlike alone, as in RWKV."""
    known = _MIXED.get(model.model)
    if known is None:
        ids = (torch.arange(5, 11, device=model.device) % model.input_vocabulary).view(2, 3)
        alone = torch.cat([_two_logits(model, row) for row in ids.split(1)])
        gap = (_two_logits(model, ids) - alone).norm(dim=-1)
        size = (alone - alone.mean(-1, keepdim=True)).norm(dim=-1)
        known = bool((gap > tolerance(model.dtype) * size).any())
        _MIXED[model.model] = known
    return known


def _two_logits(model: InferenceModel, ids: torch.Tensor) -> torch.Tensor:
    """[B, 2, V] fp32 logits of the next two tokens."""
    _clear_state(model)
    output = model.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            max_new_tokens=2, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        ),
    )  # fmt: skip
    return torch.stack(output.logits, dim=1).float()


def _clear_state(model: InferenceModel) -> None:
    """Forget the last call's rows.

    RecurrentGemma keeps its state in the module, and takes a prompt of one token for the next
    step of the last call's rows; a forward without a cache clears it.
    """
    model.model(torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False)


def _batches(prompts: Sequence[Sequence[int]], slots: int, ragged: bool) -> Iterator[list[int]]:
    """Indices of each batch; not `ragged`: of one length each."""
    groups: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(0 if ragged else len(prompt), []).append(index)
    for group in groups.values():
        for first in range(0, len(group), slots):
            yield group[first : first + slots]


def _generate(
    model: InferenceModel,
    prompts: Sequence[Sequence[int]],
    keys_B: torch.Tensor,
    params: SamplingParams,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch: tokens and log-probs [B, T]; what follows a row's stop token is padding."""
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = [[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
    processor = _CounterSampler(params, keys_B.to(model.device))
    if keeps_state(model):
        _clear_state(model)
    sequences = model.model.generate(
        torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            do_sample=False,
            eos_token_id=list(params.stop_ids) or None,
            pad_token_id=params.stop_ids[0] if params.stop_ids else 0,
        ),
        logits_processor=LogitsProcessorList([processor]),
    )
    return sequences[:, longest:], torch.stack(processor.logprobs, dim=1)


def _answer_length(row: list[int], stop_ids: tuple[int, ...]) -> int:
    """Tokens up to the first stop token, it included."""
    for index, token in enumerate(row):
        if token in stop_ids:
            return index + 1
    return len(row)


class _CounterSampler(LogitsProcessor):
    """Draws each row's token and makes it the only one left."""

    def __init__(self, params: SamplingParams, keys_B: torch.Tensor) -> None:
        self._sampler = Sampler(params, keys_B.device)
        self._uniforms_BT = uniforms(keys_B, params.max_new_tokens)
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        tokens_B, logprobs_B = self._sampler(scores, self._uniforms_BT[:, len(self.logprobs)])
        self.logprobs.append(logprobs_B)
        return torch.full_like(scores, -math.inf).scatter_(1, tokens_B[:, None], 0.0)


def _plain_generation_config(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Without the model's own defaults: they may hold penalties that nobody asked for here."""
    return temporarily([model], "generation_config", GenerationConfig())
