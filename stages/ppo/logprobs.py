"""Log-probs of sampled tokens, identical in form for the old, new and reference policy.

Legend: B answers, L tokens of prompt + response, T response tokens, N of them that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_app.training.head_scores import score_tokens
from stages.ppo.experience import Answers


def policy_logprobs(
    model: Any,
    answers: Answers,
    *,
    temperature: float,
    suppress_ids: Sequence[int] = (),
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of the actions under softmax(logits / temperature), with gradient where it is on.

    The model's head sees the actions that count and nothing else: no prompt, no padding.

    Args:
        model: a causal LM or an engine around one.
        answers: the micro-batch. The same one gives the same bits, with and without gradient.
        temperature: the rollout's: the ratio and the KL must be those of the distribution that
            was sampled.
        suppress_ids: tokens that the rollout could not sample; the rest is renormalised.
        with_entropy: also return the entropy (nats); for its gradient see `score_tokens`.

    Returns:
        (logprobs_BT, entropy_BT or None), fp32; 0 where padded.
    """
    shape = answers.actions_BT.shape
    length = answers.input_ids_BL.shape[1]
    places_BT = answers.action_index_BT + length * _rows(answers)
    # Where the actions are, without asking the device how many: the host knows.
    index_N = answers.action_mask_BT.flatten().byte().argsort(descending=True, stable=True)
    index_N = index_N[: answers.num_actions]
    scores = score_tokens(
        model,
        {
            "input_ids": answers.input_ids_BL,
            "position_ids": answers.position_ids_BL,
            # No logits of the prompts.
            "logits_to_keep": length - answers.first_action_index,
        },
        places_BT.flatten().index_select(0, index_N),
        answers.actions_BT.flatten().index_select(0, index_N),
        temperature=temperature,
        suppress_ids=suppress_ids,
        with_entropy=with_entropy,
    )
    return _spread(scores.logprobs, index_N, shape), (
        None if scores.entropy is None else _spread(scores.entropy, index_N, shape)
    )


def _rows(answers: Answers) -> torch.Tensor:
    """Numbers of the rows, [B, 1]."""
    return torch.arange(len(answers), device=answers.input_ids_BL.device).unsqueeze(1)


def _spread(values_N: torch.Tensor, index_N: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Back to [B, T], 0 where padded."""
    return values_N.new_zeros(shape.numel()).index_copy(0, index_N, values_N).view(shape)


@torch.no_grad()
def score_policy(
    model: Any,
    answers: Answers,
    *,
    temperature: float,
    suppress_ids: Sequence[int],
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`policy_logprobs` without gradient."""
    return policy_logprobs(
        model,
        answers,
        temperature=temperature,
        suppress_ids=suppress_ids,
        with_entropy=with_entropy,
    )
