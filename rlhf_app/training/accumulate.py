"""One optimizer step over any number of micro-batches and ranks, with exact scaling.

The loss of a step is sum(l) / total_weight over all tokens (or pairs) of all micro-batches
and ranks, plus that of a second objective times its weight, where there is one. DeepSpeed
averages gradients over ranks, so each micro-batch contributes sum(l) * world_size /
total_weight; the result does not depend on how rows are cut up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from rlhf_app.training.distributed import Dist
from rlhf_app.training.error_phase import within
from rlhf_app.training.phases import PhaseClock

MicroBatch = TypeVar("MicroBatch")
Added = TypeVar("Added")
LossFunction = Callable[[MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class NonFiniteError(RuntimeError):
    """Loss, gradient or score is NaN or infinite; raised on every rank, weights untouched."""


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did, the same on every rank.

    Attributes:
        loss: sum of the loss over all ranks / total weight.
        grad_norm: global L2 norm before clipping.
        lr: learning rate of this step.
        sums: each metric of the loss function, summed over micro-batches and ranks.
        added_loss: sum of the added loss / its total weight, before its coefficient.
        skipped: fp16 only: the loss scale overflowed and was lowered instead of stepping.
    """

    loss: float
    grad_norm: float
    lr: float
    sums: dict[str, float] = field(default_factory=dict)
    added_loss: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class AddedLoss(Generic[Added]):
    """A second objective of the same step: coef x its mean is added to the mean of the first.

    Attributes:
        name: for errors and the clock.
        micro_batches: this rank's; the same number on every rank, at least 1.
        loss_fn: as that of `optimizer_step`; its metrics are not used.
        total_weight: number of its tokens of all micro-batches of all ranks, > 0.
        coef: its weight in the objective.
    """

    name: str
    micro_batches: Sequence[Added]
    loss_fn: LossFunction[Added]
    total_weight: float
    coef: float


def optimizer_step(
    engine: Any,
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFunction[MicroBatch],
    total_weight: float,
    dist: Dist,
    *,
    clock: PhaseClock | None = None,
    name: str = "",
    added: AddedLoss[Any] | None = None,
) -> StepStats:
    """Runs forward and backward over the micro-batches, then one optimizer step.

    Args:
        engine: a DeepSpeed engine from `engine_for`.
        micro_batches: this rank's; the same number on every rank (`rank_slices`), at least 1.
        loss_fn: micro-batch -> (sum of the loss over its tokens or pairs, sums of metrics),
            scalars on the engine's device. Every rank returns the same metric names.
        total_weight: number of tokens or pairs of all micro-batches of all ranks, > 0.
        dist: this process's place.
        clock: is given the time of the phases `<name>_forward_backward` and `step`.
        name: of the model, for errors and the clock.
        added: a second objective over micro-batches of its own. There is one gradient, that of
            the sum, and one clipping and one step.

    Returns:
        The step's numbers.

    Raises:
        NonFiniteError: the loss of any rank, or the gradient norm, is not finite. The losses
            are looked at together after the last backward: checking each before its backward
            would wait for the GPU every time, and the gradients are thrown away anyway.
    """
    assert len(micro_batches) > 0
    assert total_weight > 0
    step = engine.global_steps + 1
    scale = dist.world_size / total_weight
    names: list[str] = []
    totals: torch.Tensor | None = None
    clock = clock or PhaseClock(dist.device)
    with clock.phase(f"{name}_forward_backward"):
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1 and added is None
            engine.set_gradient_accumulation_boundary(last)
            loss_sum, metrics = loss_fn(micro_batch)
            engine.backward(loss_sum * scale, scale_wrt_gas=False)
            names = list(metrics)
            row = torch.stack([loss_sum.detach().double(), *(m.double() for m in metrics.values())])
            totals = row if totals is None else totals + row
    assert totals is not None
    places = {f"{name} loss".strip(): 0}
    if added is not None:
        with clock.phase(f"{added.name}_forward_backward"):
            added_sum = _added_backward(engine, added, dist)
        places[f"{added.name} loss"] = len(totals)
        totals = torch.cat([totals, added_sum.unsqueeze(0)])
    # The only wait for the device before the step.
    local = totals.tolist()
    bad = [float(not math.isfinite(local[place])) for place in places.values()]
    summed = dist.sum([*local, *bad])
    for (what, place), ranks in zip(places.items(), summed[len(local) :], strict=True):
        if ranks or not math.isfinite(summed[place]):
            raise NonFiniteError(
                f"the {what} is not finite ({summed[place]}) on {int(ranks)} of "
                f"{dist.world_size} ranks at optimizer step {step}: nothing was updated. "
                "Lower the learning rate, or use dtype bf16 or fp32"
            )
    lr = engine.get_lr()[0]
    with within(f"{name}_step"), clock.phase("step"):
        grad_norm = _plain_grad_norm(engine)
        engine.step()
    # Where DeepSpeed wraps the optimizer it looks at the norm first, on all ranks alike, and
    # leaves the weights as they are when it is not finite.
    skipped = bool(getattr(engine.optimizer, "overflow", False))
    if skipped and not engine.fp16_enabled():
        raise _grad_error(step, "inf or nan")
    if grad_norm is None:
        grad_norm = float(engine.get_global_grad_norm() or 0.0)
    return StepStats(
        loss=summed[0] / total_weight,
        grad_norm=grad_norm,
        lr=lr,
        sums=dict(zip(names, summed[1:], strict=False)),
        added_loss=summed[len(local) - 1] / added.total_weight if added is not None else None,
        skipped=skipped,
    )


def _added_backward(engine: Any, added: AddedLoss[Any], dist: Dist) -> torch.Tensor:
    """Adds the gradient of the added loss to what is there; returns its sum, fp64, this rank's."""
    assert len(added.micro_batches) > 0
    assert added.total_weight > 0
    scale = added.coef * dist.world_size / added.total_weight
    total = torch.zeros((), dtype=torch.float64, device=dist.device)
    for index, micro_batch in enumerate(added.micro_batches):
        engine.set_gradient_accumulation_boundary(index == len(added.micro_batches) - 1)
        loss_sum, _ = added.loss_fn(micro_batch)
        engine.backward(loss_sum * scale, scale_wrt_gas=False)
        total += loss_sum.detach().double()
    return total


def check_evaluation(numbers: Mapping[str, float]) -> None:
    """Refuses a model whose evaluation came out non-finite, before anything of it is saved.

    Args:
        numbers: results of the evaluation, the same on every rank.

    Raises:
        NonFiniteError: on every rank, with the first number that is not finite.
    """
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise NonFiniteError(
                f"the evaluation's {name} is not finite ({number}): the model is unusable and is "
                "not saved. Lower the learning rate, or use dtype bf16 or fp32"
            )


def _plain_grad_norm(engine: Any) -> float | None:
    """The gradient norm where DeepSpeed does not wrap the optimizer (fp32, ZeRO 0), else None.

    Gradients are already averaged over ranks here, hence equal on all of them.
    """
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            raise _grad_error(engine.global_steps + 1, str(norm))
        return norm
    return None


def _grad_error(step: int, norm: str) -> NonFiniteError:
    return NonFiniteError(
        f"the gradient norm is not finite ({norm}) at optimizer step {step} "
        "although the loss is: nothing was updated. Lower the learning rate, or use dtype fp32"
    )
