"""Weights of sibling projections side by side in memory: read as one matrix, without a copy.

Query, key and value (gate and up) multiply the same input. Where their weights adjoin, one view
over all of them makes one matrix product of three. `join_storage` lays them out so before
training; an optimizer that flattens parameters keeps them so when it meets them in the order of
`adjoining_sets`. Nothing depends on it but speed: `joined` looks at the addresses as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

# Names of projections that read the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Joined(NamedTuple):
    """One matrix over several projections.

    Attributes:
        weight: [sum of out_features, in_features], a view of their memory.
        bias: [sum of out_features], likewise; None where they have none.
        sizes: out_features in the order of memory.
        places: for each projection, its place in that order.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: list[int]
    places: list[int]


def joined(linears: Sequence[nn.Linear]) -> Joined | None:
    """The projections as one, or None where their weights or biases do not adjoin.

    Args:
        linears: projections of the same input.
    """
    order = sorted(range(len(linears)), key=lambda i: linears[i].weight.data_ptr())
    ordered = [linears[i] for i in order]
    weight = _one_view([linear.weight for linear in ordered])
    if weight is None:
        return None
    bias = None
    biases = [linear.bias for linear in ordered if linear.bias is not None]
    if biases:
        bias = _one_view(biases) if len(biases) == len(ordered) else None
        if bias is None:
            return None
    places = [order.index(i) for i in range(len(linears))]
    return Joined(weight, bias, [linear.weight.shape[0] for linear in ordered], places)


def _one_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors, which follow each other in memory, as one along their first dimension."""
    first = tensors[0].detach()
    storage = first.untyped_storage().data_ptr()
    end = first.data_ptr()
    rows = 0
    for tensor in tensors:
        # Empty: a shard of which nothing is here.
        alike = tensor.dtype == first.dtype and tensor.shape[1:] == first.shape[1:]
        if not (alike and tensor.numel() and tensor.is_contiguous() and tensor.data_ptr() == end):
            return None
        if tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.numel() * tensor.element_size()
        rows += tensor.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def join_storage(model: nn.Module) -> int:
    """Move the weights and biases of sibling projections side by side.

    Parameters stay the same objects with the same values at new addresses: call it before
    anything holds their memory. Tied, sharded, or foreign memory is left where it is.

    Args:
        model: any module; siblings are known by their names.

    Returns:
        How many sets of siblings adjoin now that did not before.
    """
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        address = parameter.untyped_storage().data_ptr()
        owners[address] = owners.get(address, 0) + 1
    moved = 0
    for linears in _siblings(model):
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if len(biases) not in (0, len(linears)) or joined(linears) is not None:
            continue
        if all(_movable(parameter, owners) for parameter in (*weights, *biases)):
            _adjoin(weights)
            if biases:
                _adjoin(biases)
            moved += 1
    return moved


def _movable(parameter: torch.Tensor, owners: dict[int, int]) -> bool:
    storage = parameter.untyped_storage()
    if parameter.device.type == "meta" or parameter.is_shared() != parameter.is_cuda:
        return False  # other processes look at it
    alone = owners[storage.data_ptr()] == 1
    whole = storage.nbytes() == parameter.numel() * parameter.element_size()
    return alone and whole and parameter.numel() > 0


def _adjoin(parameters: Sequence[torch.Tensor]) -> None:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = whole[start : start + parameter.shape[0]]
        start += parameter.shape[0]


def adjoining_sets(
    model: nn.Module, parameters: Iterable[nn.Parameter]
) -> list[list[nn.Parameter]]:
    """The parameters with siblings together: their weights in a row, then their biases.

    Args:
        model: whose parameters they are.
        parameters: all or some of its parameters, in any order.

    Returns:
        The same parameters: siblings as one set, each other one alone; only siblings change
        places.
    """
    wanted = {id(parameter): parameter for parameter in parameters}
    sets: dict[int, list[nn.Parameter]] = {}
    for linears in _siblings(model):
        both = [linear.weight for linear in linears]
        both += [linear.bias for linear in linears if linear.bias is not None]
        together = [wanted[id(parameter)] for parameter in both if id(parameter) in wanted]
        for parameter in together:
            sets[id(parameter)] = together
    ordered: dict[int, list[nn.Parameter]] = {}
    for key, parameter in wanted.items():
        together = sets.get(key, [parameter])
        ordered.setdefault(id(together[0]), together)
    return list(ordered.values())


def _siblings(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Sets of plain projections that read the same input."""
    for module in model.modules():
        for names in _SIBLINGS:
            children = [getattr(module, name, None) for name in names]
            linears = [child for child in children if type(child) is nn.Linear]
            if len(linears) == len(names) and len({x.in_features for x in linears}) == 1:
                yield linears
