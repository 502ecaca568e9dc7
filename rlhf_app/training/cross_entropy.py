"""Cross-entropy of text under a causal LM. Shapes: B rows, T positions, N tokens with loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_app.training.batching import pad_rows
from rlhf_app.training.head_scores import score_tokens
from rlhf_app.training.host_copy import to_device


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of text.

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


def token_batch(
    rows: Sequence[Sequence[int]],
    targets: Sequence[Sequence[tuple[int, int]]],
    pad_id: int,
    device: torch.device,
    *,
    limit: int,
    filler: Sequence[int],
) -> TokenBatch:
    """Builds one micro-batch.

    Args:
        rows: token ids; no row at all gives a batch of the filler alone, without loss, so that
            a rank with nothing to do still takes part in the collectives.
        targets: of each row, the spans (first, after the last) of its tokens with loss. The
            very first token is predicted by nothing: spans start at 1 or later.
        pad_id: fills up rows.
        device: of the ids.
        limit: the model's positions.
        filler: any row.
    """
    # Widths that are multiples of 8 suit tensor cores; on the CPU padding only costs.
    multiple = 8 if device.type == "cuda" else 1
    input_ids_BT = pad_rows(list(rows) or [filler], pad_id, multiple, limit)
    mask_BT = torch.zeros(input_ids_BT.shape, dtype=torch.bool)
    for index, (_, spans) in enumerate(zip(rows, targets, strict=True)):
        for first, end in spans:
            mask_BT[index, first:end] = True
    return TokenBatch(to_device(input_ids_BT, device), mask_BT)


def cross_entropy(model: Any, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy in nats, summed over the tokens that count.

    Args:
        model: a causal LM or an engine around one. Its head sees the hidden states that predict
            a token with loss and no others; log-softmax is taken in fp32.
        batch: the micro-batch.

    Returns:
        (fp32 scalar, {"correct": tokens whose target is the most likely one}). The sum over
        no token is 0 and still has a gradient, of zeros.
    """
    # The mask is on the host, so that selecting tokens does not wait for the GPU.
    index_N = to_device(batch.mask_BT.flatten().nonzero().squeeze(1), batch.input_ids_BT.device)
    scores = score_tokens(
        model,
        {"input_ids": batch.input_ids_BT, "logits_to_keep": batch.logits_needed},
        # The logits at one position predict the token at the next.
        index_N - 1,
        batch.input_ids_BT.flatten().index_select(0, index_N),
        with_correct=True,
    )
    assert scores.correct is not None
    return -scores.logprobs.sum(), {"correct": scores.correct.sum()}
