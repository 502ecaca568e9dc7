"""Which tokens of a demonstration carry loss, and micro-batches of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data_sources.examples import LossOn, SequenceExample, target_spans
from rlhf_app.training.cross_entropy import TokenBatch, token_batch


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
        [target_spans(example, loss_on) for example in examples],
        pad_id,
        device,
        limit=limit,
        filler=filler.input_ids,
    )
