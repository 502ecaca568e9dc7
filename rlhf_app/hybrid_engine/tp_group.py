"""Ranks that share one rollout: what they exchange before it and in every step of it.

Shapes: B rows.

Every rank brings its own prompts, in any number and of any lengths, without their padding: a
prompt's attention mask has been applied before anything is sent. All ranks of a group then run
all rows of the group in the same order, and each keeps the answers to its own prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as torch_dist

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.agreement import Agreement
from rlhf_app.hybrid_engine.decode import Rollout
from rlhf_app.hybrid_engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What one rank wants from a rollout.

    Attributes:
        prompts: ids of each request, without padding.
        keys: one int64 per request, the start of its random stream.
        params: how tokens are drawn; their seed and step are in the keys already.
        limits: most tokens of each request's answer.
        slots: rows that this rank alone would decode at once.
        room: rows that find room in its memory, or None when that is not asked.
    """

    prompts: list[list[int]]
    keys: list[int]
    params: SamplingParams
    limits: list[int]
    slots: int
    room: int | None = None


def merged(requests: Sequence[RankRequest]) -> RankRequest:
    """One request for the rows of all ranks, in rank order.

    Args:
        requests: with the same sampling parameters but for seed and step.
    """
    # Each rank holds its part of every row: as many rows as fit on the fullest rank.
    rooms = [request.room for request in requests if request.room is not None]
    return RankRequest(
        prompts=[prompt for request in requests for prompt in request.prompts],
        keys=[key for request in requests for key in request.keys],
        params=requests[0].params,
        limits=[limit for request in requests for limit in request.limits],
        # One slot at least: a rank without prompts still takes part.
        slots=min([max(1, sum(request.slots for request in requests)), *rooms]),
    )


class RankGroup:
    """Consecutive ranks that share their rollouts. Every process makes its own at the same time.

    Attributes:
        size: ranks of a group.
        rank: this rank's place in it.
        agreement: of this group, or of all.

    Args:
        size: ranks of a group.
        together: all groups roll out at the same time, because weights are gathered from all
            ranks: they then also agree on how.

    Raises:
        ConfigError: the number of processes is no multiple of `size`.
    """

    def __init__(self, size: int, *, together: bool = False) -> None:
        world = torch_dist.get_world_size() if torch_dist.is_initialized() else 1
        if world % size:
            raise ConfigError(
                f"hybrid_engine.inference_tp_size is {size}: it does not divide the {world} "
                "processes of the run; change one of them"
            )
        rank = torch_dist.get_rank()
        self.size = size
        self.rank = rank % size
        self._first = rank - self.rank
        for first in range(0, world, size):
            # Every process has to take part in making every group.
            made = torch_dist.new_group(list(range(first, first + size)))
            if first == self._first:
                self._group = made
        self.agreement = Agreement(torch_dist.group.WORLD if together else self._group)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place where the tensor is contiguous.

        Args:
            partial: any shape, equal on all ranks.
        """
        partial = partial.contiguous()
        torch_dist.all_reduce(partial, group=self._group)
        return partial

    def same(
        self, tokens_B: torch.Tensor, logprobs_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first rank's draws, on all ranks: one differing token would part them for good.

        Args:
            tokens_B: [B] int64.
            logprobs_B: [B] fp32.
        """
        # One message: fp64 holds every token id and every fp32 number exactly.
        both = torch.stack([tokens_B.double(), logprobs_B.double()])
        torch_dist.broadcast(both, self._first, group=self._group)
        return both[0].long(), both[1].float()

    def gather(self, request: RankRequest) -> list[RankRequest]:
        """Every rank's request, in rank order.

        Args:
            request: of this rank.

        Raises:
            ConfigError: the ranks want different sampling.
        """
        requests: list[RankRequest] = [request] * self.size
        torch_dist.all_gather_object(requests, request, group=self._group)
        for rank, other in enumerate(requests):
            _check_alike(requests[0].params, other.params, self._first, self._first + rank)
        return requests

    def own(self, rollout: Rollout, requests: Sequence[RankRequest]) -> Rollout:
        """This rank's part of the group's answers.

        Args:
            rollout: answers to all requests.
            requests: what `gather` returned.
        """
        start = sum(len(request.prompts) for request in requests[: self.rank])
        mine = slice(start, start + len(requests[self.rank].prompts))
        tokens = rollout.tokens[mine]
        return Rollout(
            tokens,
            rollout.logprobs[mine],
            rollout.stopped[mine],
            replace(
                rollout.timings,
                prompt_tokens=sum(map(len, requests[self.rank].prompts)),
                generated_tokens=sum(map(len, tokens)),
                form=f"{rollout.timings.form} | tensor parallel {self.size}",
            ),
        )


def _check_alike(first: SamplingParams, other: SamplingParams, rank: int, of: int) -> None:
    """Refuse ranks of one group that sample differently."""
    for name in [field.name for field in fields(SamplingParams)]:
        mine, its = getattr(first, name), getattr(other, name)
        if name not in ("seed", "step") and mine != its:
            raise ConfigError(
                f"{name} is {mine} on rank {rank} and {its} on rank {of}: ranks that share a "
                "rollout (hybrid_engine.inference_tp_size) need the same sampling parameters"
            )
