"""The SFT loss. Shapes: B rows, T positions, V vocabulary, N tokens that carry loss."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def response_loss(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy in nats, summed over the tokens that count.

    Args:
        logits_BTV: any float dtype; `logits[b, t]` predicts `targets[b, t]`. Log-softmax is
            taken in fp32.
        targets_BT: int64 token ids.
        mask_BT: bool, True = counts. On the host, so that selecting tokens does not wait for
            the GPU.

    Returns:
        (fp32 scalar, {"correct": tokens whose target is the most likely one}). The sum over
        no token is 0 and still has a gradient, of zeros.
    """
    index_N = mask_BT.flatten().nonzero().squeeze(1).to(logits_BTV.device)
    logits_NV = logits_BTV.flatten(0, 1).index_select(0, index_N)
    targets_N = targets_BT.flatten().index_select(0, index_N)
    loss = F.cross_entropy(logits_NV.float(), targets_N, reduction="sum")
    return loss, {"correct": (logits_NV.detach().argmax(-1) == targets_N).sum()}
