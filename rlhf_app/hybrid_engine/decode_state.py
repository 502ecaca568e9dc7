"""What one rollout keeps on the device: per-row state, drawn tokens, their log-probs.

Shapes: N requests, S rows at most, B active rows, T answer tokens, V vocabulary.

The buffers outlive a rollout when they are large enough, so that a captured decode step finds
them where it left them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from rlhf_app.hybrid_engine import sampling_kernel
from rlhf_app.hybrid_engine.sampling import Sampler, SamplingParams, uniforms
from rlhf_app.hybrid_engine.sampling_kernel import KernelSampler, Records
from rlhf_app.hybrid_engine.upload import upload

# Rows of the state tensor. Some things are done to neighbours at once: see `record`, `flags`.
TOKEN, POSITION, COUNT, ALIVE, STOPPED, REQUEST, SLOT, LIMIT = range(8)
_FIELDS = 8
_MOST_KINDS = 32  # of sampling, whose constants are kept


def distribution(params: SamplingParams) -> SamplingParams:
    """The parameters without what only chooses the draws: equal for rollouts of one kind."""
    return replace(params, seed=0, step=0)


class Answers(NamedTuple):
    """Drawn tokens [N, T] int64 and log-probs [N, T] fp32 on the host."""

    tokens: torch.Tensor
    logprobs: torch.Tensor


class DecodeState:
    """Buffers of the decode loop on one device.

    Attributes:
        rows: [fields, S] int64. TOKEN is the last token of a row and POSITION its place in the
            row, COUNT the answer tokens drawn and LIMIT the most there may be, REQUEST whose
            answer it is, ALIVE whether it goes on, STOPPED whether a stop id ended it, SLOT
            where its keys and values are.
        constants: sampler and stop ids of the current rollout, on the device.
        agree: makes drawn tokens and log-probs [B] the same on ranks that share a rollout;
            None where there are none.

    Args:
        device: where the model's ids go in.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.agree: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        self._constants: dict[SamplingParams, tuple[Sampler | KernelSampler, torch.Tensor]] = {}
        self._allocate(0, 0, 0)

    def _allocate(self, requests: int, columns: int, rows: int) -> None:
        self._size = (requests, columns, rows)
        size, device = (requests, columns), self._device
        self._tokens_NT = torch.zeros(size, dtype=torch.int64, device=device)
        self._logprobs_NT = torch.zeros(size, dtype=torch.float32, device=device)
        self._uniforms_NT = torch.zeros(size, dtype=torch.float64, device=device)
        self.rows = torch.zeros((_FIELDS, rows), dtype=torch.int64, device=device)

    def begin(
        self, params: SamplingParams, keys_N: torch.Tensor, limits: Sequence[int], slots: int
    ) -> None:
        """Make room for a rollout and draw its uniforms.

        Args:
            params: how tokens are drawn.
            keys_N: [N] int64 on the CPU, the start of each request's random stream.
            limits: most tokens of each request's answer, at most `params.max_new_tokens`.
            slots: rows decoded at once.
        """
        # One request more for rows that are nobody's, and one column more than can be used:
        # rows that finished, but were not yet seen to have finished, write there.
        wanted = (len(keys_N) + 1, params.max_new_tokens + 1, slots)
        if any(want > have for want, have in zip(wanted, self._size, strict=True)):
            self._allocate(*map(max, zip(wanted, self._size, strict=True)))
        self._nobody = self._size[0] - 1
        self._params = params
        self._limits = limits
        # A captured step reads the tensors in them, and keeps them alive.
        kind = distribution(params)
        if kind not in self._constants:
            if len(self._constants) >= _MOST_KINDS:
                self._constants.clear()
            stop_ids = torch.tensor(params.stop_ids, device=self._device, dtype=torch.int64)
            fused = sampling_kernel.available(self._device)
            sampler = (KernelSampler if fused else Sampler)(params, self._device)
            self._constants[kind] = sampler, stop_ids
        self.constants = self._constants[kind]
        self._sampler, self._stop_ids = self.constants
        if not params.greedy:
            drawn = uniforms(keys_N.to(self._device), params.max_new_tokens + 1)
            self._uniforms_NT[: len(keys_N), : params.max_new_tokens + 1] = drawn
        self.clear(0, range(slots))

    @property
    def _records(self) -> Records:
        """Not kept: it would hold the buffers beyond their release."""
        return Records(self._tokens_NT, self._logprobs_NT, self._uniforms_NT, self._stop_ids)

    def release(self) -> None:
        """Give the buffers back; the next rollout takes new ones."""
        self._allocate(0, 0, 0)
        self._constants.clear()  # of the last kind, what is in use stays

    def clear(self, first: int, slots: Sequence[int]) -> None:
        """Make the rows from `first` on nobody's: what they compute goes nowhere.

        Args:
            first: the first such row.
            slots: of each of them, no live row's: a step of more rows than are alive still
                stores keys and values for all of its rows.
        """
        rows = self.rows[:, first : first + len(slots)]
        rows.zero_()
        rows[REQUEST] = self._nobody
        rows[SLOT] = upload(slots, self._device)

    def admit(
        self, first: int, requests: Sequence[int], slots: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        """Start rows whose prompts have just been run.

        Args:
            first: row of the first of them.
            requests: whose answers they are.
            slots: where their keys and values are.
            lengths: tokens of each prompt.

        Returns:
            [fields, B] view of these rows.
        """
        state = self.rows[:, first : first + len(requests)]
        state.zero_()
        positions = [length - 1 for length in lengths]
        limits = [self._limits[request] for request in requests]
        values = upload([positions, requests, slots, limits], self._device)
        state[POSITION], state[REQUEST], state[SLOT], state[LIMIT] = values
        state[ALIVE] = 1
        return state

    def record(self, state: torch.Tensor, logits_BV: torch.Tensor) -> None:
        """Draw each row's next token; advance the rows that are alive.

        Args:
            state: [fields, B] view of `rows`.
            logits_BV: logits of the next token of each row.
        """
        if self.agree is None and isinstance(self._sampler, KernelSampler):
            self._sampler.record(state, logits_BV, self._records)
            return
        # Few operations, and in place: on the CPU a small model's step is hardly more than these.
        token, _, count, alive, stopped, request, _, limit = state.unbind()
        place_B = torch.add(count, request, alpha=self._size[1])
        tokens_B, logprobs_B = self._sampler(logits_BV, self._uniforms_NT.take(place_B))
        if self.agree is not None:
            tokens_B, logprobs_B = self.agree(tokens_B, logprobs_B)
        self._tokens_NT.put_(place_B, tokens_B)
        self._logprobs_NT.put_(place_B, logprobs_B)
        token.copy_(tokens_B)
        state[POSITION : COUNT + 1].add_(alive)
        goes_on = count < limit
        if len(self._stop_ids):
            stop = (tokens_B[:, None] == self._stop_ids).any(dim=1)
            stopped.add_(alive * stop)
            goes_on.logical_and_(stop.logical_not_())
        alive.mul_(goes_on)

    def answers(self, requests: int) -> Answers:
        """What was drawn for the first `requests` requests, copied to the host."""
        columns = self._params.max_new_tokens
        return Answers(
            self._tokens_NT[:requests, :columns].cpu(),
            self._logprobs_NT[:requests, :columns].cpu(),
        )

    @property
    def flags(self) -> torch.Tensor:
        """[3, S] int64 view of COUNT, ALIVE and STOPPED: all that tells how a row goes on."""
        return self.rows[COUNT : STOPPED + 1]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the buffers are: a captured step reads and writes there."""
        buffers = (self._tokens_NT, self._logprobs_NT, self._uniforms_NT, self.rows)
        return tuple(buffer.data_ptr() for buffer in buffers)
