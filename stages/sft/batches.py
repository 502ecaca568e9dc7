"""Which tokens of a demonstration carry loss, and micro-batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from data_sources.examples import SequenceExample
from rlhf_app.training.cross_entropy import TokenBatch, token_batch

LossOn = Literal["response", "all"]


def first_target(example: SequenceExample, loss_on: LossOn) -> int:
    """Index of the first token with loss; the very first token is never predicted."""
    return max(1, example.response_start if loss_on == "response" else 1)


def target_tokens(example: SequenceExample, loss_on: LossOn) -> int:
    """Number of tokens of one row that carry loss."""
    return max(0, len(example.input_ids) - first_target(example, loss_on))


def collate(
    examples: Sequence[SequenceExample],
    loss_on: LossOn,
    pad_id: int,
    device: torch.device,
    *,
    limit: int,
    filler: SequenceExample,
) -> TokenBatch:
    """Builds one micro-batch; see `token_batch`.

    Args:
        examples: its rows, possibly none.
        loss_on: which tokens carry loss.
        pad_id: fills up rows.
        device: of the ids.
        limit: the model's positions.
        filler: any example.
    """
    return token_batch(
        [example.input_ids for example in examples],
        [first_target(example, loss_on) for example in examples],
        pad_id,
        device,
        limit=limit,
        filler=filler.input_ids,
    )
