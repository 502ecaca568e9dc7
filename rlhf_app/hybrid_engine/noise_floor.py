"""What rounding alone does to log-probs: training forwards compared with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rlhf_app.hybrid_engine import lora
from rlhf_app.hybrid_engine.training_scores import Answered, training_logprobs
from rlhf_app.report.verification import Gap
from rlhf_app.training.distributed import Dist

# Deep or sharp models round more: then their own noise floor, times these, is the bound.
_FLOORS = (4.0, 8.0)
_UNBOUNDED = 1e9
# Forwards from which the effect of experts that change places is estimated.
_ROUTING_PASSES = 2
# How configs name the number of experts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def with_floor(
    engine: Any, answered: Sequence[Answered], trained: list[torch.Tensor], gap: Gap, dist: Dist
) -> Gap:
    """The gap with its noise floor, and bounds that heed it; all ranks call it.

    Args:
        engine: in train mode.
        answered: what is compared.
        trained: log-probs of the training forward.
        gap: before.
        dist: process group.
    """
    rows = [(part, row) for part in answered for row in range(len(part.prompts))]
    alone = []
    for index in range(max(dist.gather_objects(len(rows)))):
        part, row = rows[index % len(rows)]  # ranks with fewer rows repeat some, unused
        alone += training_logprobs(engine, _only(part, row))
    alone = alone[: len(rows)]
    floor_mean, floor_max, _ = difference(alone, trained)
    return replace(
        gap,
        floor_mean=floor_mean,
        floor_max=floor_max,
        mean_bound=max(gap.mean_bound, _FLOORS[0] * floor_mean),
        max_bound=max(gap.max_bound, _FLOORS[1] * floor_max),
    )


def routes(model: Any) -> bool:
    """Whether tokens choose experts: where two nearly tie, rounding decides on a whole expert."""
    config = lora.without_wrapper(model).config.get_text_config()
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)


def with_routing(
    engine: Any, answered: Sequence[Answered], trained: list[torch.Tensor], gap: Gap
) -> Gap:
    """The gap with bounds for a model with experts; all ranks call it.

    Few tokens change experts, but their log-probs then differ by nats. Training forwards whose
    embeddings are off by one rounding more show how far: that far a rollout may be as well.

    Args:
        engine: in train mode.
        answered: what is compared.
        trained: log-probs of the training forward.
        gap: before.
    """
    found = []
    for number in range(_ROUTING_PASSES):
        with _rounded_otherwise(engine, number):
            scores = [row for part in answered for row in training_logprobs(engine, part)]
        found.append(difference(scores, trained))
    return replace(
        gap,
        mean_bound=max(gap.mean_bound, *(mean for mean, _, _ in found)),
        max_bound=max(gap.max_bound, *(largest for _, largest, _ in found)),
    )


@contextmanager
def _rounded_otherwise(engine: Any, seed: int) -> Iterator[None]:
    """Embeddings off by a random relative error, normal with the dtype's epsilon."""
    draw = torch.Generator().manual_seed(seed)

    def disturb(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=draw).to(output.device)
        factor = 1 + torch.finfo(output.dtype).eps * noise
        return (output.float() * factor).to(output.dtype)

    embedding = lora.without_wrapper(engine.module).get_input_embeddings()
    handle = embedding.register_forward_hook(disturb)
    try:
        yield
    finally:
        handle.remove()


def _only(answered: Answered, row: int) -> Answered:
    return replace(
        answered,
        prompts=[answered.prompts[row]],
        answers=[answered.answers[row]],
        logprobs=[answered.logprobs[row]],
        stopped=[answered.stopped[row]],
    )


def difference(
    some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[float, float, int]:
    """Mean and largest absolute difference, and the number of tokens.

    Where the training forward itself is not finite there is nothing to compare with: its caller
    counts such tokens. A rollout that is not finite differs without bound.

    Args:
        some: fp32 or fp64 log-probs, of a rollout or of another training forward.
        others: those of the training forward.
    """
    one, other = torch.cat(list(some)).double(), torch.cat(list(others)).double()
    gap = (one - other)[other.isfinite()].abs()
    gap = gap.nan_to_num(nan=_UNBOUNDED, posinf=_UNBOUNDED)
    if not len(gap):
        return 0.0, 0.0, 0
    return float(gap.mean()), float(gap.max()), len(gap)
