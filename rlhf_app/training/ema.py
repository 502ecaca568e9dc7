"""An exponential moving average of the weights in training, in fp32, split as their masters are.

After each optimizer step avg = decay * avg + (1 - decay) * w (Polyak and Juditsky 1992). Where
training is in half precision, w is the fp32 master that the optimizer steps and never its
rounding: an average kept in half precision loses every change below half a unit in the last
place, which at decay 0.992 is nearly all of them, and stays where it began.

A rank averages the part of the masters that it owns, so that a step needs no message and memory
shrinks with the number of ranks. A frozen base under adapters has no masters and no average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_app.training.deepspeed_module import load_deepspeed
from rlhf_app.training.distributed import Dist
from rlhf_app.training.error_phase import within
from rlhf_app.training.saving import gather_state_dict

# Elements that are worked on at a time: temporaries stay at 256 MiB.
_CHUNK = 1 << 26
# Where DeepSpeed's optimizers keep this rank's part of the fp32 weights.
_MASTERS = (
    "single_partition_of_fp32_groups",  # ZeRO 1 and 2
    "fp32_groups_flat_partition",  # ZeRO 1 in bf16
    "fp32_partitioned_groups_flat",  # ZeRO 3
)


def fp32_masters(engine: Any) -> list[torch.Tensor]:
    """This rank's share of the weights that the optimizer steps, as flat or whole tensors.

    Under ZeRO the shares of all ranks make up the trained weights, once; without it (fp32,
    ZeRO 0) they are the trained parameters themselves, on every rank.

    Args:
        engine: a DeepSpeed engine from `engine_for`.
    """
    optimizer = engine.optimizer
    for name in _MASTERS:
        if hasattr(optimizer, name):
            return [tensor.detach() for tensor in getattr(optimizer, name)]
    assert isinstance(optimizer, torch.optim.Optimizer)
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


class WeightAverage:
    """The average of an engine's trained weights, and how far both have gone from the start.

    Costs 4 bytes a trained parameter, and for the start as many as training holds a weight in
    (2 in bf16), divided by the number of ranks under ZeRO (in half precision always). They lie
    where the masters lie.

    Args:
        engine: a DeepSpeed engine from `engine_for`, before its first step.
        decay: share of the average that a step keeps, in [0, 1).
        dist: this process's place.
    """

    @within("load")
    def __init__(self, engine: Any, decay: float, dist: Dist) -> None:
        assert 0 <= decay < 1
        self._engine = engine
        self._decay = decay
        self._dist = dist
        masters = fp32_masters(engine)
        self._average = [master.clone() for master in masters]
        # Masters begin as their weights are: in the training dtype nothing of them is lost.
        dtypes = {p.dtype for p in engine.module.parameters() if p.requires_grad}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self._start = [master.to(dtype, copy=True) for master in masters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now: once after each optimizer step that was made."""
        masters = fp32_masters(self._engine)
        torch._foreach_lerp_(self._average, masters, 1.0 - self._decay)

    def distances(self) -> dict[str, float]:
        """How far average and weights have gone: ||w - w_0|| / ||w_0|| (L2).

        Returns:
            `ema_distance` of the average and `sft_distance` of the weights in training from
            the weights at the start; over all trained parameters, the same on every rank.
        """
        squares = [
            _square_distance(self._average, self._start),
            _square_distance(fp32_masters(self._engine), self._start),
            _square_distance(self._start, None),
        ]
        # Where every rank has all weights, all three are counted once a rank: ratios stay.
        average, weights, start = self._dist.sum(squares)
        norm = max(start, 1e-30) ** 0.5
        return {"ema_distance": average**0.5 / norm, "sft_distance": weights**0.5 / norm}

    def state_dict(self) -> dict[str, Any]:
        """This rank's share, for a checkpoint: load it into as many ranks, of one ZeRO stage."""
        return {"average": self._average, "start": self._start}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for mine, saved in ((self._average, state["average"]), (self._start, state["start"])):
            for to, value in zip(mine, saved, strict=True):
                to.copy_(value)

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole model's weights with the averaged ones in their places.

        The weights in training are the same to the last bit afterwards. Every rank must call.

        Returns:
            State dict on the CPU in the training dtype, keys as the model's own (adapters not
            merged); empty on all ranks but the main one.
        """
        model, main = self._engine.module, self._dist.is_main
        with self._in_place():
            state = gather_state_dict(model, self._dist)
            if isinstance(self._engine.optimizer, torch.optim.Optimizer):
                return state
            averaged: dict[int, torch.Tensor] = {}
            for name, tensor in model.state_dict(keep_vars=True).items():
                if not tensor.requires_grad:
                    continue
                if id(tensor) not in averaged:  # tied weights stay tied
                    whole = load_deepspeed().utils.safe_get_full_fp32_param(tensor)
                    averaged[id(tensor)] = whole.to(tensor.dtype).cpu() if main else whole[:0]
                if main:
                    state[name] = averaged[id(tensor)]
        return state

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The average is in the masters, and they in its place; the model's copies stay."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for one, other in zip(self._average, fp32_masters(self._engine), strict=True):
            pieces = (tensor.view(-1).split(_CHUNK) for tensor in (one, other))
            for mine, theirs in zip(*pieces, strict=True):
                kept = mine.clone()
                mine.copy_(theirs)
                theirs.copy_(kept)


@torch.no_grad()
def _square_distance(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] | None
) -> float:
    """Sum of (a - b)^2 over all elements, in fp64; of a^2 without `others`."""
    total = 0.0
    for index, tensor in enumerate(tensors):
        pieces = tensor.reshape(-1).split(_CHUNK)
        minus = (
            others[index].reshape(-1).split(_CHUNK) if others is not None else [None] * len(pieces)
        )
        for a, b in zip(pieces, minus, strict=True):
            gap = a.float() if b is None else a.float() - b.float()
            total += float(torch.linalg.vector_norm(gap, dtype=torch.float64)) ** 2
    return total
