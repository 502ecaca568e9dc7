"""Answers scored by the forward that the loss differentiates.

Shapes: R rows, L tokens of prompt and answer, T answer tokens, V vocabulary.
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
    logits_RLV = training_logits(engine, rows)
    found = []
    for row, (prompt, tokens) in enumerate(zip(answered.prompts, answered.answers, strict=True)):
        first = len(prompt) - 1
        logits_TV = logits_RLV[row, first : first + len(tokens)]
        spread = _spread(logits_TV.float() / params.temperature)
        found.append((score_row(logits_TV, tokens, params), spread))
    return found


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
