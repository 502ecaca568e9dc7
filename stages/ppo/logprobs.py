"""Log-probs of sampled tokens, identical in form for the old, new and reference policy.

Legend: B answers, L tokens of prompt + response, T response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stages.ppo.experience import Answers


def action_logits(model: Any, answers: Answers) -> torch.Tensor:
    """Logits that predict each action, raw.

    Args:
        model: a causal LM or an engine around one; called with `input_ids`, `position_ids` and
            `logits_to_keep`, so that no logits of the prompt are computed.
        answers: the micro-batch.

    Returns:
        logits_BTV in the model's dtype; rows of padding hold the logits of some real position.
    """
    length = answers.input_ids_BL.shape[1]
    first = answers.first_action_index
    output = model(
        input_ids=answers.input_ids_BL,
        position_ids=answers.position_ids_BL,
        use_cache=False,
        logits_to_keep=length - first,
    )
    rows = torch.arange(len(answers), device=output.logits.device).unsqueeze(1)
    logits_BTV: torch.Tensor = output.logits[rows, answers.action_index_BT - first]
    return logits_BTV


def token_logprobs(
    logits_BTV: torch.Tensor,
    actions_BT: torch.Tensor,
    *,
    temperature: float,
    suppress_ids: Sequence[int] = (),
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of `actions_BT` under softmax(logits / temperature), in fp32.

    Args:
        logits_BTV: raw logits, any float dtype.
        actions_BT: int64 token ids.
        temperature: the rollout's: the ratio and the KL must be those of the distribution that
            was sampled.
        suppress_ids: tokens that the rollout could not sample; the rest is renormalised.
        with_entropy: also return the entropy (nats), without gradient.

    Returns:
        (logprobs_BT, entropy_BT or None), fp32.
    """
    scaled_BTV = logits_BTV.float() / temperature
    if suppress_ids:
        index = torch.tensor(list(suppress_ids), device=scaled_BTV.device)
        scaled_BTV = scaled_BTV.index_fill(-1, index, float("-inf"))
    all_logprobs_BTV = scaled_BTV.log_softmax(dim=-1)
    logprobs_BT = all_logprobs_BTV.gather(-1, actions_BT.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return logprobs_BT, None
    with torch.no_grad():
        # entr(p) = -p log p with entr(0) = 0, so suppressed tokens add nothing.
        entropy_BT = torch.special.entr(all_logprobs_BTV.exp()).sum(dim=-1)
    return logprobs_BT, entropy_BT


@torch.no_grad()
def score_policy(
    model: Any,
    answers: Answers,
    *,
    temperature: float,
    suppress_ids: Sequence[int],
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`token_logprobs` of a whole micro-batch under `model`, without gradient."""
    return token_logprobs(
        action_logits(model, answers),
        answers.actions_BT,
        temperature=temperature,
        suppress_ids=suppress_ids,
        with_entropy=with_entropy,
    )
