"""The SFT loss. Shapes: B rows, T positions, N tokens that carry loss."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_app.training.head_scores import score_tokens
from rlhf_app.training.host_copy import to_device
from stages.sft.batches import SFTBatch


def response_loss(model: Any, batch: SFTBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
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
