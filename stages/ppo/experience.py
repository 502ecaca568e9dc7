"""Answers laid out for the training forward, and the experience computed from them.

Layout: each row is prompt then response, left-aligned and right-padded. Causal attention makes
the padding harmless, so positions are 0..L-1 in every row and no attention mask is needed.
Action t of a row is predicted by the hidden state at index prompt_length + t - 1.

Legend: N all answers of this rank, B answers of a micro-batch, L tokens of prompt + response,
T response tokens (actions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_app.training.batching import pad_rows
from rlhf_app.training.host_copy import to_device


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
        rows_B: int64 place of each row in the table that it was taken from.
        first_action_index: least action index of the micro-batch.
        num_actions: counted actions.
    """

    input_ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor
    actions_BT: torch.Tensor
    action_index_BT: torch.Tensor
    action_mask_BT: torch.Tensor
    last_index_B: torch.Tensor
    rows_B: torch.Tensor
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

    def put(self, values_BT: torch.Tensor, into_NT: torch.Tensor) -> None:
        """Write per-action values to these answers' rows of a table of all answers."""
        into_NT[:, : values_BT.shape[1]].index_copy_(0, self.rows_B, values_BT)

    def take(self, values_NT: torch.Tensor) -> torch.Tensor:
        """Read these answers' rows of a table of all answers, as [B, T]."""
        return values_NT[:, : self.actions_BT.shape[1]].index_select(0, self.rows_B)


@dataclass(frozen=True, slots=True)
class Experience:
    """Answers with everything that the update needs. All fp32, no gradients.

    Attributes:
        answers: the layout.
        old_logprobs_BT: under the policy that sampled, by the training forward.
        reference_BT: log-probs under the reference.
        advantages_BT: whitened where configured.
        old_values_BT: critic values; None without a critic.
        returns_BT: unwhitened advantages + values; None without a critic.
    """

    answers: Answers
    old_logprobs_BT: torch.Tensor
    reference_BT: torch.Tensor
    advantages_BT: torch.Tensor
    old_values_BT: torch.Tensor | None = None
    returns_BT: torch.Tensor | None = None


class AnswerTable:
    """All answers of this rank, uploaded once; micro-batches are cut out on the device.

    Args:
        prompts: token ids, at least one each (something must predict the first action).
        responses: token ids; may be empty.
        device: of the tensors.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> None:
        assert len(prompts) == len(responses) > 0
        assert all(len(prompt) > 0 for prompt in prompts), "a prompt needs at least one token"
        rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
        self._prompts = [len(prompt) for prompt in prompts]
        self._responses = [len(response) for response in responses]
        #: Tokens of each row, prompt and response.
        self.lengths = [len(row) for row in rows]
        self._device = device
        self._input_ids_NL = to_device(pad_rows(rows, 0), device)
        sizes = torch.tensor([self._prompts, self._responses])
        self._prompts_N, self._responses_N = to_device(sizes, device).unbind()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest_response(self) -> int:
        """Columns of a table with one entry an action, at least 1."""
        return max(1, *self._responses)

    def action_mask(self) -> torch.Tensor:
        """mask_NT: bool, the actions of all rows."""
        t_1T = torch.arange(self.longest_response, device=self._device).unsqueeze(0)
        return t_1T < self._responses_N.unsqueeze(1)

    def layout(self, rows: Sequence[int]) -> Answers:
        """Some answers as one right-padded micro-batch.

        Args:
            rows: their places in the table, in the order of the micro-batch.
        """
        width = max(self.lengths[row] for row in rows)
        actions = max(1, *(self._responses[row] for row in rows))
        rows_B = to_device(torch.tensor(list(rows)), self._device)
        input_ids_BL = self._input_ids_NL[:, :width].index_select(0, rows_B)
        prompt_lengths_B1 = self._prompts_N.index_select(0, rows_B).unsqueeze(1)
        lengths_B1 = self._responses_N.index_select(0, rows_B).unsqueeze(1)
        t_1T = torch.arange(actions, device=self._device).unsqueeze(0)
        mask_BT = t_1T < lengths_B1
        # Padded actions point at the last prompt token, a position that always exists.
        index_BT = torch.where(mask_BT, prompt_lengths_B1 + t_1T - 1, prompt_lengths_B1 - 1)
        actions_BT = torch.where(
            mask_BT, input_ids_BL.gather(1, (index_BT + 1).clamp(max=width - 1)), 0
        )
        positions_L = torch.arange(width, device=self._device)
        return Answers(
            input_ids_BL=input_ids_BL,
            position_ids_BL=positions_L.expand(len(rows), width).contiguous(),
            actions_BT=actions_BT,
            action_index_BT=index_BT,
            action_mask_BT=mask_BT,
            last_index_B=(prompt_lengths_B1 + lengths_B1 - 1).squeeze(1),
            rows_B=rows_B,
            first_action_index=min(self._prompts[row] for row in rows) - 1,
            num_actions=sum(self._responses[row] for row in rows),
        )


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
    return AnswerTable(prompts, responses, device).layout(range(len(prompts)))
