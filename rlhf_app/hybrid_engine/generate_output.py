"""Answers in the shape that transformers' generate returns them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from rlhf_app.hybrid_engine.decode import Rollout
from rlhf_app.hybrid_engine.hf_arguments import Request


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns.

    Attributes:
        sequences: [B, P + T] int64, prompt and answer; rows that ended early are padded.
        logprobs: [B, T] fp32, log-probs of the sampled distribution; 0 on padding.
    """

    logprobs: torch.Tensor | None = None


def as_output(rollout: Rollout, request: Request, input_ids: torch.Tensor) -> Any:
    """Answers behind their prompts, in the shape that transformers returns.

    Args:
        rollout: one answer per prompt of the request.
        request: what was asked for.
        input_ids: [B, P] as the caller gave them.

    Returns:
        [B, P + T] int64, or a `GenerateOutput` where the request wants one.

    Raises:
        RuntimeError: tokens were sampled where there was no distribution to sample from, which
            transformers refuses as well. A greedy answer is what transformers would return.
    """
    if request.params is not None and not request.params.greedy:
        _check_sampled(rollout)
    copies = len(rollout.tokens) // input_ids.shape[0]
    longest = max(map(len, rollout.tokens))
    padded = [row + [request.pad_id] * (longest - len(row)) for row in rollout.tokens]
    answers = torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat([input_ids.repeat_interleave(copies, dim=0), answers], dim=1)
    if not request.return_dict:
        return sequences
    logprobs = torch.nn.utils.rnn.pad_sequence(rollout.logprobs, batch_first=True)
    return GenerateOutput(sequences=sequences, logprobs=logprobs.to(input_ids.device))


def _check_sampled(rollout: Rollout) -> None:
    """Once per call, on log-probs that are on the host anyway."""
    if torch.cat(rollout.logprobs).isfinite().all():
        return
    row = next(i for i, row in enumerate(rollout.logprobs) if not row.isfinite().all())
    raise RuntimeError(
        f"generate: no distribution to sample from in row {row}, whose log-probs are not finite: "
        "the logits are NaN or infinite (as of a temperature close to 0), or every token is "
        "suppressed"
    )
