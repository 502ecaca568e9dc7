"""Answers laid out for the training forward, and the experience computed from them.

Layout: each row is prompt then response, left-aligned and right-padded. Causal attention makes
the padding harmless, so positions are 0..L-1 in every row and no attention mask is needed.
Action t of a row is predicted by the hidden state at index prompt_length + t - 1.

Legend: B answers, L tokens of prompt + response, T response tokens (actions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Answers:
    """One micro-batch of answers. Its rows and padding never change after the rollout.

    Old log-probs are computed in exactly this layout, so that before the first optimizer step
    the ratio is 1 to the last bit.

    Attributes:
        input_ids_BL: int64.
        position_ids_BL: int64, 0..L-1.
        actions_BT: int64 sampled tokens, 0 where padded.
        action_index_BT: int64 index in L of the state that predicts each action.
        action_mask_BT: bool.
        last_index_B: int64 index in L of the last response token, where the reward model reads.
        first_action_index: least action index of the micro-batch.
        num_actions: counted actions.
    """

    input_ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor
    actions_BT: torch.Tensor
    action_index_BT: torch.Tensor
    action_mask_BT: torch.Tensor
    last_index_B: torch.Tensor
    first_action_index: int
    num_actions: int

    def __len__(self) -> int:
        return self.input_ids_BL.shape[0]

    def at_actions(self, values_BL: torch.Tensor) -> torch.Tensor:
        """Pick the entries of a [B, L] tensor that belong to the actions, as [B, T]."""
        return values_BL.gather(1, self.action_index_BT)

    def at_last(self, values_BL: torch.Tensor) -> torch.Tensor:
        """Pick the entry of a [B, L] tensor at the last response token, as [B]."""
        return values_BL.gather(1, self.last_index_B.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True, slots=True)
class Experience:
    """Answers with everything that the update needs. All fp32, no gradients.

    Attributes:
        answers: the layout.
        old_logprobs_BT: under the policy that sampled, by the training forward.
        old_values_BT: critic values.
        advantages_BT: whitened where configured.
        returns_BT: unwhitened advantages + values.
    """

    answers: Answers
    old_logprobs_BT: torch.Tensor
    old_values_BT: torch.Tensor
    advantages_BT: torch.Tensor
    returns_BT: torch.Tensor


def lay_out(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> Answers:
    """Lay out prompts and responses as one right-padded micro-batch.

    Args:
        prompts: token ids, at least one each (something must predict the first action).
        responses: token ids; may be empty.
        device: of the tensors.

    Returns:
        The micro-batch, rows in the given order.
    """
    assert len(prompts) == len(responses) > 0
    assert all(len(prompt) > 0 for prompt in prompts), "a prompt needs at least one token"
    rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    width = max(map(len, rows))
    actions = max(1, *map(len, responses))
    input_ids_BL = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    prompt_lengths_B1 = torch.tensor([[len(p)] for p in prompts])
    lengths_B1 = torch.tensor([[len(r)] for r in responses])
    t_1T = torch.arange(actions).unsqueeze(0)
    mask_BT = t_1T < lengths_B1
    # Padded actions point at the last prompt token, a position that always exists.
    index_BT = torch.where(mask_BT, prompt_lengths_B1 + t_1T - 1, prompt_lengths_B1 - 1)
    actions_BT = torch.where(
        mask_BT, input_ids_BL.gather(1, (index_BT + 1).clamp(max=width - 1)), 0
    )
    return Answers(
        input_ids_BL=input_ids_BL.to(device),
        position_ids_BL=torch.arange(width, device=device).expand(len(rows), width).contiguous(),
        actions_BT=actions_BT.to(device),
        action_index_BT=index_BT.to(device),
        action_mask_BT=mask_BT.to(device),
        last_index_B=(prompt_lengths_B1 + lengths_B1 - 1).squeeze(1).to(device),
        first_action_index=int(index_BT.min()),
        num_actions=sum(map(len, responses)),
    )
