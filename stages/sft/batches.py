"""From examples to tensors. Shapes: B rows, T positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from data_sources.examples import SequenceExample
from rlhf_app.training.batching import pad_rows
from rlhf_app.training.host_copy import to_device

LossOn = Literal["response", "all"]


@dataclass(frozen=True)
class SFTBatch:
    """One micro-batch.

    Attributes:
        input_ids_BT: int64, left-aligned, padded on the right.
        mask_BT: bool on the host, True = this token carries loss. The end token of an answer
            does, exactly once, whatever the padding id is: the mask comes from lengths.
    """

    input_ids_BT: torch.Tensor
    mask_BT: torch.Tensor

    @property
    def logits_needed(self) -> int:
        """Logits at the end of the row that predict a token with loss, the last one included.

        Those before the shortest prompt's end are not computed at all.
        """
        width = self.mask_BT.shape[1]
        columns = self.mask_BT.any(0).nonzero()
        first = int(columns[0]) if len(columns) else width
        return width - first + 1


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
) -> SFTBatch:
    """Builds one micro-batch.

    Args:
        examples: its rows; none at all gives a batch of the filler alone, without loss, so
            that a rank with nothing to do still takes part in the collectives.
        loss_on: which tokens carry loss.
        pad_id: fills up rows.
        device: of the ids.
        limit: the model's positions.
        filler: any example.
    """
    rows = list(examples) or [filler]
    # Widths that are multiples of 8 suit tensor cores; on the CPU padding only costs.
    multiple = 8 if device.type == "cuda" else 1
    input_ids_BT = pad_rows([row.input_ids for row in rows], pad_id, multiple, limit)
    mask_BT = torch.zeros(input_ids_BT.shape, dtype=torch.bool)
    for index, row in enumerate(examples):
        mask_BT[index, first_target(row, loss_on) : len(row.input_ids)] = True
    return SFTBatch(to_device(input_ids_BT, device), mask_BT)
