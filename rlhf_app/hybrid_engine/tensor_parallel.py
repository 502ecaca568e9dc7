"""Tensor-parallel rollouts: for the time of a rollout each rank computes with its slice.

The module stays the one that is trained. Inside `SlicedWeights.available` its parameters are
replaced by this rank's slices: views of whole weights, and temporary 1/TP copies where ZeRO-3
has split the weights over all ranks, or where a fused q, k, v has to be cut into pieces. Hooks
add up the partial outputs. Everything is put back on exit, also after an exception.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_app.hybrid_engine.agreement import Agreement
from rlhf_app.hybrid_engine.tp_group import RankGroup
from rlhf_app.hybrid_engine.tp_plans import NotSliceable, SlicingPlan, slicing_plan
from rlhf_app.hybrid_engine.weights import Weights
from rlhf_app.hybrid_engine.zero3 import ShardedWeights, decoder_layers

logger = logging.getLogger(__name__)


class _Divided:
    """A config seen with one number divided; everything else is read from it when asked for,
    as the config also says which attention runs."""

    def __init__(self, whole: Any, number: str, by: int) -> None:
        self._whole = whole
        setattr(self, number, getattr(whole, number) // by)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class SlicedWeights:
    """A rank's slices of a model, as `Weights`: inside `available` only they are computed with.

    Attributes:
        group: the ranks that share a rollout.
        base: the weights behind the slices.
        slice_bytes: of the weights that this rank computes with.
        copied_bytes: of these, temporary copies that exist during a rollout only.
        whole_bytes: of the whole model.

    Args:
        model: the module that is trained.
        plan: how it is cut.
        group: the ranks that share a rollout.
        base: how whole weights become usable.
        layers_per_gather: ZeRO-3: layers that are whole at a time while slices are taken.
    """

    lockstep = False
    settled = False

    def __init__(
        self,
        model: PreTrainedModel,
        plan: SlicingPlan,
        group: RankGroup,
        base: Weights,
        layers_per_gather: int,
    ) -> None:
        self.group = group
        self.base = base
        self._model = model
        self._plan = plan
        self._layers_per_gather = layers_per_gather
        self._active = False
        self._count_bytes()
        logger.info(
            "tensor parallel rollouts over %d ranks: this rank computes with %d of %d bytes of "
            "weights, %d of them temporary copies",
            group.size, self.slice_bytes, self.whole_bytes, self.copied_bytes,
        )  # fmt: skip

    @property
    def agreement(self) -> Agreement:
        """Of the group, under ZeRO-3 of all ranks."""
        return self.group.agreement

    @property
    def gather_seconds(self) -> float:
        """Of the base."""
        return self.base.gather_seconds

    @property
    def gathered_bytes(self) -> int:
        """Of the base."""
        return self.base.gathered_bytes

    @contextmanager
    def available(self) -> Iterator[None]:
        """The module computes with this rank's slices. All ranks enter together; nests."""
        if self._active:
            yield
            return
        with ExitStack() as stack:
            self._active = True
            stack.callback(setattr, self, "_active", False)
            if isinstance(self.base, ShardedWeights):
                stack.enter_context(self.base.without_hooks())
                self._gather_slices(stack, self.base)
            else:
                stack.enter_context(self.base.available())
                for path, parameter in self._parameters():
                    self._replace(stack, path, self._part(path, parameter))
            self._divide_attributes(stack)
            for path in self._plan.reduced:
                hook = self._model.get_submodule(path).register_forward_hook(self._add_up)
                stack.callback(hook.remove)
            yield

    def whole(self) -> AbstractContextManager[None]:
        """Whole weights, as the base has them: for forwards that are not shared."""
        return self.base.whole()

    @contextmanager
    def uncut(self) -> Iterator[None]:
        """`available` gives whole weights inside; under ZeRO-3 never all of them at once."""
        assert not self._active
        weights = self.base
        if isinstance(weights, ShardedWeights):
            weights = weights.streamed(self._layers_per_gather)
        with weights.available():
            self._active = True
            try:
                yield
            finally:
                self._active = False

    def together(self) -> AbstractContextManager[None]:
        """Nothing can be done: a rank that fails between two sums of a forward cannot tell the
        others, which wait for it until the process group's timeout or until it ends."""
        return nullcontext()

    def any_working(self, working: bool) -> bool:
        """This rank's own answer: all ranks of the group have the same rows."""
        return working

    def idle_forward(self) -> None:
        """Never needed."""

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Every place of every parameter, tied ones at each of their places."""
        return list(self._model.named_parameters(remove_duplicate=False))

    def _part(self, path: str, parameter: torch.Tensor) -> torch.Tensor | None:
        """What this rank has in place of a whole parameter; None where that is itself."""
        cut = self._plan.cuts.get(path)
        if cut is not None:
            return cut.take(parameter.detach(), self.group.rank, self.group.size)
        if path in self._plan.once and self.group.rank:
            return torch.zeros_like(parameter, requires_grad=False)
        return None

    def _gather_slices(self, stack: ExitStack, base: ShardedWeights) -> None:
        """ZeRO-3: take slices a few layers at a time; what stays whole is gathered to stay."""
        places = self._parameters()
        cuts = self._plan.cuts
        stack.enter_context(base.gathered([p for path, p in places if path not in cuts]))
        for path, parameter in places:
            if path not in cuts:
                self._replace(stack, path, self._part(path, parameter))
        for group in self._gather_groups(places):
            with base.gathered([parameter for _, parameter in group]):
                for path, parameter in group:
                    part = self._part(path, parameter)
                    assert part is not None
                    # A view would keep the whole weight: all of a group lie in one buffer.
                    one_block = len(cuts[path].blocks) == 1
                    self._replace(stack, path, part.clone() if one_block else part)

    def _gather_groups(
        self, places: list[tuple[str, torch.Tensor]]
    ) -> list[list[tuple[str, torch.Tensor]]]:
        """The parameters that are cut, of `layers_per_gather` layers at a time."""
        layer_of = {
            id(module): index
            for index, layer in enumerate(decoder_layers(self._model))
            for module in layer.modules()
        }
        groups: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for path, parameter in places:
            if path in self._plan.cuts:
                module = self._model.get_submodule(path.rpartition(".")[0])
                index = layer_of.get(id(module), 0) // self._layers_per_gather
                groups.setdefault(index, []).append((path, parameter))
        return [groups[index] for index in sorted(groups)]

    def _replace(self, stack: ExitStack, path: str, part: torch.Tensor | None) -> None:
        if part is None:
            return
        owner, _, name = path.rpartition(".")
        # Past `register_parameter`: a slice is a plain tensor, and its place is kept.
        slots: dict[str, Any] = self._model.get_submodule(owner)._parameters
        stack.callback(slots.__setitem__, name, slots[name])
        slots[name] = part

    def _divide_attributes(self, stack: ExitStack) -> None:
        size = self.group.size
        for path, name, number in self._plan.divided:
            attributes = self._model.get_submodule(path).__dict__
            whole = attributes[name]
            stack.callback(attributes.__setitem__, name, whole)
            attributes[name] = _Divided(whole, number, size) if number else whole // size

    def _add_up(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return self.group.sum(output)

    def _count_bytes(self) -> None:
        """Plan the memory of a rollout."""
        self.slice_bytes = self.copied_bytes = self.whole_bytes = 0
        sharded = isinstance(self.base, ShardedWeights)
        # A tied parameter counts once.
        for path, parameter in self._model.named_parameters():
            cut = self._plan.cuts.get(path)
            numel = int(getattr(parameter, "ds_numel", parameter.numel()))
            size = numel * parameter.element_size()
            part = size if cut is None else size // self.group.size
            zeros = path in self._plan.once and self.group.rank > 0
            self.whole_bytes += size
            self.slice_bytes += part
            if sharded or zeros or (cut is not None and len(cut.blocks) > 1):
                self.copied_bytes += part


def shared_out(
    model: PreTrainedModel, weights: Weights, ranks: int, layers_per_gather: int
) -> Weights:
    """Slices of a model's weights, or with one warning the whole weights where none fit.

    Args:
        model: the module that is trained.
        weights: how whole weights become usable.
        ranks: the `inference_tp_size` setting, > 1.
        layers_per_gather: the `tp_gather_partition_size` setting.

    Raises:
        ConfigError: the number of processes is no multiple of `ranks`.
    """
    group = RankGroup(ranks, together=isinstance(weights, ShardedWeights))
    try:
        plan = slicing_plan(model, ranks)
    except NotSliceable as reason:
        warn_whole(model, str(reason))
        return weights
    return SlicedWeights(model, plan, group, weights, layers_per_gather)


def warn_whole(model: PreTrainedModel, reason: str) -> None:
    """Say why rollouts are not shared out over ranks.

    Args:
        model: the model.
        reason: in words.
    """
    logger.warning(
        "hybrid_engine.inference_tp_size: model type %r: %s; every rank rolls out with whole "
        "weights (tensor parallel size 1)", model.config.model_type, reason,
    )  # fmt: skip
