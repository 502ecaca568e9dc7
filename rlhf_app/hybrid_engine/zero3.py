"""Weights that ZeRO-3 has split over the ranks, made whole for a rollout.

`PinnedWeights` gathers all of them once per rollout. `StreamedWeights` gathers groups of decoder
layers in every forward: the memory of one group instead of the whole model, at the price of the
whole model's traffic per token.

What was gathered here is given back here, also on exceptions: every parameter is then in the
state in which DeepSpeed left it, as its own forward and backward expect.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

from rlhf_app.hybrid_engine.agreement import Agreement
from rlhf_app.hybrid_engine.deepspeed_hooks import engine_hooks, parameter_offload, suspended

logger = logging.getLogger(__name__)

# What a rank answers to `any_working`, beside 0 and 1.
_FAILED = 2


class ShardedWeights:
    """What both ways of gathering share.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 3.
    """

    settled = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.gather_seconds = 0.0
        self.gathered_bytes = 0

    @property
    def agreement(self) -> Agreement:
        """Of all ranks that hold a shard: every call gathers from all of them."""
        return Agreement(self._process_group())

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every weight, gathered on entry and given back on exit. All ranks enter together."""
        with self.without_hooks(), self.gathered(self._engine.module.parameters()):
            yield

    def uncut(self) -> AbstractContextManager[None]:
        """Nothing to do: weights are split, but none is cut for a rank."""
        return nullcontext()

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Forwards that DeepSpeed does not see: its hooks would partition a layer that has run."""
        with suspended(engine_hooks(self._engine)):
            # A forward without backward leaves prefetched weights in flight: wait for them, else
            # they can be neither gathered nor partitioned.
            coordinator = parameter_offload(self._engine).get_param_coordinator()
            coordinator._clean_inflight_param_registry()
            yield

    @contextmanager
    def gathered(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """These parameters whole, inside `without_hooks`. All ranks enter together.

        Args:
            parameters: in the same order on every rank.
        """
        mine = self._gather(parameters)
        try:
            yield
        finally:
            _give_back(mine)

    def streamed(self, layers_per_group: int) -> StreamedWeights:
        """The same weights, a few layers at a time.

        Args:
            layers_per_group: decoder layers that are whole at a time.
        """
        return StreamedWeights(self._engine, layers_per_group)

    def _process_group(self) -> Any:
        parameter: Any = next(self._engine.module.parameters())
        return parameter.ds_process_group

    def _gather(self, parameters: Iterable[torch.Tensor]) -> list[Any]:
        """Make parameters whole.

        Returns:
            Those that were not: only they may be given back. DeepSpeed keeps small ones whole,
            and large ones too between forwards that follow each other.
        """
        start = time.perf_counter()
        missing: list[Any] = [p for p in parameters if _is_missing(p)]
        if missing:
            # In one call: the collectives run side by side. It returns when they are done.
            missing[0].all_gather(param_list=missing)
        self.gather_seconds += time.perf_counter() - start
        self.gathered_bytes += sum(p.numel() * p.element_size() for p in missing)
        return missing


class PinnedWeights(ShardedWeights):
    """All weights whole for the time of a rollout; ranks then run at their own pace.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 3.
    """

    lockstep = False

    @contextmanager
    def available(self) -> Iterator[None]:
        """The same as `whole`. Nests: what is whole already is left alone."""
        with self.whole():
            yield

    def together(self) -> AbstractContextManager[None]:
        """Nothing to do: with all weights whole ranks do not wait for each other."""
        return nullcontext()

    def any_working(self, working: bool) -> bool:
        """This rank's own answer: ranks do not wait for each other."""
        return working

    def idle_forward(self) -> None:
        """Never needed."""


class StreamedWeights(ShardedWeights):
    """Decoder layers come and go in groups, within each forward; ranks run in lockstep.

    Weights outside the decoder layers (embeddings, last norm, head), and any that two groups
    share, are used by every forward and stay for the whole rollout.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 3.
        layers_per_group: decoder layers that are whole at a time.
    """

    # On one rank as well: gathering is part of the forward, so no graph can hold it.
    lockstep = True

    def __init__(self, engine: Any, layers_per_group: int) -> None:
        super().__init__(engine)
        self._layers_per_group = layers_per_group
        self._groups: list[list[torch.Tensor]] = []
        self._current = -1
        self._mine: list[Any] = []
        self._warned = False
        self._owes_forward = False
        self._reachable = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every weight at once, in spite of the settings: with one warning."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "hybrid_engine.pin_parameters is false, but native generate needs all weights at "
                "once: they are gathered for each of its calls"
            )
        with super().whole():
            yield

    @contextmanager
    def available(self) -> Iterator[None]:
        """Forwards inside gather what they need. All ranks enter together; nests."""
        if self._groups:
            yield
            return
        layers = decoder_layers(self._engine.module)
        held, groups = self._split(layers)
        with self.without_hooks(), self.gathered(held):
            handles = [
                self._engine.module.register_forward_pre_hook(self._start, prepend=True),
                self._engine.module.register_forward_hook(self._finish),
            ]
            for index, layer in enumerate(layers):
                group = index // self._layers_per_group
                handles.append(layer.register_forward_pre_hook(self._entering(group), prepend=True))
            self._groups = groups
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
                self._let_go()
                self._groups = []

    @contextmanager
    def together(self) -> Iterator[None]:
        """One decode loop: an error inside ends it on every rank, with the rank and the error.

        The failing rank first takes part in what is left of the others' forward. An error of
        a collective itself cannot be told: the others then wait until the process group's
        timeout.
        """
        self._owes_forward, self._reachable = False, True
        try:
            yield
        except Exception as error:
            if self._reachable:
                if self._owes_forward:
                    self._finish()
                self._tell(_FAILED, error)
            raise

    def any_working(self, working: bool) -> bool:
        """Whether any rank still has work.

        Args:
            working: this rank's answer. Every rank asks before every forward.

        Raises:
            RuntimeError: another rank has failed in this rollout.
        """
        self._owes_forward = self._tell(int(working))
        return self._owes_forward

    def idle_forward(self) -> None:
        """Gather and release every group, as a forward of the other ranks does."""
        self._start()
        self._finish()

    def _tell(self, state: int, error: Exception | None = None) -> bool:
        """Exchange what every rank is about to do; True when one of them has work."""
        self._reachable = False
        parameter = next(self._engine.module.parameters())
        flag = torch.tensor(state, device=parameter.device)
        torch_dist.all_reduce(flag, op=torch_dist.ReduceOp.MAX, group=self._process_group())
        most = int(flag.item())
        if most == _FAILED:
            self.agreement.end(error)
        self._reachable = most > 0  # else the loop is over for all of them
        return self._reachable

    def _split(self, layers: Sequence[nn.Module]) -> tuple[list[Any], list[list[Any]]]:
        """Parameters that stay, and those of each group of layers."""
        groups = []
        for first in range(0, len(layers), self._layers_per_group):
            group = layers[first : first + self._layers_per_group]
            # A dict keeps the order, in which every rank must gather.
            groups.append(dict.fromkeys(p for layer in group for p in _used_by(layer)))
        uses = Counter(p for group in groups for p in group)
        outside = _outside(self._engine.module, layers)
        streamed = [[p for p in group if uses[p] == 1 and p not in outside] for group in groups]
        coming_and_going = {p for group in streamed for p in group}
        held = [p for p in self._engine.module.parameters() if p not in coming_and_going]
        return held, streamed

    def _start(self, *_: Any) -> None:
        self._let_go()  # of what a forward that failed has left

    def _finish(self, *_: Any) -> None:
        # Should a forward skip layers, the other ranks still expect their gathers.
        for group in range(self._current + 1, len(self._groups)):
            self._switch(group)
        self._let_go()
        self._owes_forward = False

    def _entering(self, group: int) -> Any:
        def hook(*_: Any) -> None:
            if group == self._current:
                return
            if group != self._current + 1:
                raise RuntimeError(
                    "decoder layers do not run in order: their weights cannot be gathered layer "
                    "by layer; set hybrid_engine.pin_parameters to true"
                )
            self._switch(group)

        return hook

    def _switch(self, group: int) -> None:
        _give_back(self._mine)
        self._mine = []
        self._reachable = False  # after an error in a collective nothing can be exchanged
        self._mine = self._gather(self._groups[group])
        self._reachable = True
        self._current = group

    def _let_go(self) -> None:
        _give_back(self._mine)
        self._mine = []
        self._current = -1


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers, in order: its largest list of modules.

    Args:
        model: a causal LM, partitioned or not; without any list there are no layers.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    # Lists inside a layer (experts) are smaller; the outermost of two equal ones comes first.
    sizes = [_size(module) for module in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def _size(module: nn.Module) -> int:
    """Weights of a module; a partitioned one has numel 0 and its size in ds_numel."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())


def _used_by(layer: nn.Module) -> Iterator[Any]:
    """A layer's parameters, and those of other modules that DeepSpeed saw it use."""
    yield from layer.parameters()
    for module in layer.modules():
        for _, parameter in getattr(module, "_external_params", {}).items():
            yield parameter


def _outside(model: nn.Module, layers: Sequence[nn.Module]) -> set[Any]:
    """Parameters of modules that lie in no decoder layer."""
    inside = {module for layer in layers for module in layer.modules()}
    return {
        parameter
        for module in model.modules()
        if module not in inside
        for parameter in [
            *module.parameters(recurse=False), *getattr(module, "_external_params", {}).values()
        ]
    }  # fmt: skip


def _is_missing(parameter: Any) -> bool:
    # By name: importing DeepSpeed's enum would import DeepSpeed at the top of this module.
    return hasattr(parameter, "ds_status") and parameter.ds_status.name == "NOT_AVAILABLE"


def _give_back(parameters: list[Any]) -> None:
    """Free the whole weights; the shards were never touched."""
    if parameters:
        parameters[0].partition(param_list=parameters)
