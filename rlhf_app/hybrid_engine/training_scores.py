"""Answers scored by the forward that the loss differentiates.

Shapes: R rows, L tokens of prompt and answer, T answer tokens, N those of all rows, E hidden
size, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_app.hybrid_engine import lora
from rlhf_app.hybrid_engine.draws import RowScores, score_row
from rlhf_app.hybrid_engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Answered:
    """Prompts with their answers, and the log-probs that the rollout gave them.

    Attributes:
        prompts, answers: token ids.
        logprobs: one fp32 CPU tensor per answer.
        params: how the answers were drawn, the uid of each being its index.
        stopped: whether the rollout says that a stop id ended the answer.
    """

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    logprobs: Sequence[torch.Tensor]
    params: SamplingParams
    stopped: Sequence[bool]


def training_logprobs(engine: Any, answered: Answered) -> list[torch.Tensor]:
    """Log-probs of answer tokens by the training forward, all rows in one right-padded batch.

    Args:
        engine: a DeepSpeed engine around a causal LM, or the model itself.
        answered: prompts and answers; their params say which distribution.

    Returns:
        One fp64 CPU tensor per answer.
    """
    return [row.logprobs for row, _ in training_scores(engine, answered)]


@torch.no_grad()
def training_scores(engine: Any, answered: Answered) -> list[tuple[RowScores, float]]:
    """Of each answer its tokens' scores, and the spread of the logits behind them.

    Args:
        engine: a DeepSpeed engine around a causal LM, or the model itself.
        answered: prompts and answers; their params say which distribution.
    """
    params = answered.params
    assert params.top_k == 0, "the training forward knows no top-k"
    assert params.top_p == 1.0, "the training forward knows no top-p"
    rows = [[*p, *a] for p, a in zip(answered.prompts, answered.answers, strict=True)]
    spans = [
        range(len(prompt) - 1, len(prompt) - 1 + len(tokens))
        for prompt, tokens in zip(answered.prompts, answered.answers, strict=True)
    ]
    found = []
    for logits_TV, tokens in zip(_logits_at(engine, rows, spans), answered.answers, strict=True):
        spread = _spread(logits_TV.float() / params.temperature)
        found.append((score_row(logits_TV, tokens, params), spread))
    return found


def _logits_at(
    engine: Any, rows: Sequence[Sequence[int]], spans: Sequence[range]
) -> Sequence[torch.Tensor]:
    """`training_logits` at some positions of each row, [T, V] a row.

    The head is given the hidden states of these positions only: over a large vocabulary the
    logits of long prompts would take gigabytes.

    Args:
        engine: a DeepSpeed engine around a causal LM, or the model itself.
        rows: token ids, none empty.
        spans: positions of each row.
    """
    model = lora.without_wrapper(getattr(engine, "module", engine))
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    counts = [len(span) for span in spans]
    shape = len(rows), max(map(len, rows))
    places = [row * shape[1] + at for row, span in enumerate(spans) for at in span]

    def pick(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not inputs or inputs[0].shape[:2] != shape:
            return None
        hidden_RLE = inputs[0]
        index_N = torch.tensor(places, device=hidden_RLE.device, dtype=torch.int64)
        return (hidden_RLE.flatten(0, 1)[index_N].unsqueeze(0), *inputs[1:])

    hook = None if head is None else head.register_forward_pre_hook(pick)
    try:
        logits = training_logits(engine, rows)
    finally:
        if hook is not None:
            hook.remove()
    if logits.shape[:2] == shape:  # no head by that name, or a compiled one without hooks
        return [logits[row, list(span)] for row, span in enumerate(spans)]
    return logits[0].split(counts)


def _spread(logits_TV: torch.Tensor) -> float:
    """Standard deviation over the vocabulary, mean over tokens.

    Some models give entries that are no tokens a logit of -inf: they are left out.
    """
    known_TV = logits_TV.masked_fill(~logits_TV.isfinite(), math.nan)
    centred_TV = known_TV - known_TV.nanmean(-1, keepdim=True)
    return float(centred_TV.square().nanmean(-1).sqrt().nanmean().nan_to_num(0.0))


def training_logits(engine: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """The training forward of ragged rows: right-padded, positions from 0, no attention mask.

    Args:
        engine: a DeepSpeed engine around a causal LM, or the model itself.
        rows: token ids, none empty.

    Returns:
        [R, L, V] logits; causal attention keeps padding from what precedes it.
    """
    model = lora.without_wrapper(getattr(engine, "module", engine))
    device = model.get_input_embeddings().weight.device
    longest = max(map(len, rows))
    ids_RL = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    extras: dict[str, Any] = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        extras["position_ids"] = torch.arange(longest, device=device).expand(ids_RL.shape)
    logits: torch.Tensor = engine(input_ids=ids_RL, use_cache=False, **extras).logits
    return logits
