"""From pairs to tensors. Shapes: B pairs, 2B rows (all chosen, then all rejected), T positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from data_sources.examples import PairExample
from rlhf_app.training.batching import pad_rows
from rlhf_app.training.host_copy import to_device


@dataclass(frozen=True)
class PairBatch:
    """One micro-batch, for one forward over both answers of each pair.

    Attributes:
        input_ids_2BT: int64, left-aligned, padded on the right; chosen rows first.
        tokens_2B: int64 length of each row's answer.
        last_2B: int64 index of each row's last token, from its length: no padding id is
            looked for, so any id may be the padding.
        first_B: int64 first position at which the two answers differ.
        margin_B: fp32.
        weight_B: fp32, 1 for a pair and 0 for the filler of a rank with nothing to do.
    """

    input_ids_2BT: torch.Tensor
    tokens_2B: torch.Tensor
    last_2B: torch.Tensor
    first_B: torch.Tensor
    margin_B: torch.Tensor
    weight_B: torch.Tensor

    def at_last(self, scores_2BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of the whole answers, (chosen_B, rejected_B), from those of all prefixes."""
        chosen_B, rejected_B = scores_2BT.gather(1, self.last_2B.unsqueeze(1)).squeeze(1).chunk(2)
        return chosen_B, rejected_B


def first_difference(chosen: Sequence[int], rejected: Sequence[int]) -> int:
    """First index at which two different rows differ; one may be the start of the other."""
    shorter = min(len(chosen), len(rejected))
    return next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)


def collate(
    pairs: Sequence[PairExample],
    pad_id: int,
    device: torch.device,
    *,
    limit: int,
    use_margin: bool,
    filler: PairExample,
) -> PairBatch:
    """Builds one micro-batch.

    Args:
        pairs: its pairs; none at all gives the filler with weight 0.
        pad_id: fills up rows.
        device: of the tensors.
        limit: the model's positions.
        use_margin: False: margins are 0.
        filler: any pair.
    """
    used = list(pairs) or [filler]
    both = [pair.chosen for pair in used] + [pair.rejected for pair in used]
    rows = [answer.input_ids for answer in both]
    tokens = [len(answer.input_ids) - answer.response_start for answer in both]
    first = [first_difference(p.chosen.input_ids, p.rejected.input_ids) for p in used]
    margin = [pair.margin if use_margin else 0.0 for pair in used]
    # Widths that are multiples of 8 suit tensor cores; on the CPU padding only costs.
    multiple = 8 if device.type == "cuda" else 1
    return PairBatch(
        input_ids_2BT=to_device(pad_rows(rows, pad_id, multiple, limit), device),
        tokens_2B=to_device(torch.tensor(tokens), device),
        last_2B=to_device(torch.tensor([len(row) - 1 for row in rows]), device),
        first_B=to_device(torch.tensor(first), device),
        margin_B=to_device(torch.tensor(margin, dtype=torch.float32), device),
        weight_B=torch.full((len(used),), float(bool(pairs)), device=device),
    )
