"""Least times that a machine allows for generation, from stated formulas.

Shapes: B rows, P prompt tokens, T answer tokens, W read bandwidth, F peak arithmetic rate.

A decode step reads the weights once and every live row's keys and values once. Its limit is

    KV bytes / W + max(weight bytes / W, GEMM FLOPs / F)

since attention over the cache and the GEMMs are separate kernels, and a GEMM may overlap its
own reading with its arithmetic. Prefill is limited by its FLOPs, attention included, over F.
A multiplication with an addition counts as two FLOPs. Plain numbers only: no torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one attention layer stores and computes.

    Attributes:
        kv_bytes: of one token's key and value.
        width: query heads x head size.
        window: most tokens that a query sees, itself included; None: all before it.
    """

    kv_bytes: int
    width: int
    window: int | None = None

    def seen(self, stored: int) -> int:
        """Tokens of a row that are read when it holds `stored`."""
        return stored if self.window is None else min(stored, self.window)

    def seen_between(self, first: int, last: int) -> int:
        """Sum of `seen` over first, first + 1, ..., last; 0 where last < first."""
        if last < first:
            return 0
        if self.window is None or last <= self.window:
            return (first + last) * (last - first + 1) // 2
        if first > self.window:
            return self.window * (last - first + 1)
        return self.seen_between(first, self.window) + self.window * (last - self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What a decoder moves and computes.

    Attributes:
        weight_bytes: read by one decode step: every parameter once, without tables of which a
            step reads single rows (input and position embeddings). A tied output embedding
            counts once.
        layer_weights: numbers in the matrices that every token is multiplied with.
        head_weights: the same of the output embedding, which only picked tokens need.
        layers: attention layers.
    """

    weight_bytes: int
    layer_weights: int
    head_weights: int
    layers: tuple[LayerCost, ...]

    def kv_bytes(self, stored: int) -> int:
        """Bytes of keys and values that one row reads in a step in which it holds `stored`."""
        return self.kv_bytes_between(stored, stored)

    def kv_bytes_between(self, first: int, last: int) -> int:
        """Sum of `kv_bytes` over first, first + 1, ..., last."""
        return sum(
            count * layer.kv_bytes * layer.seen_between(first, last)
            for layer, count in Counter(self.layers).items()
        )

    def decode_flops(self, rows: int) -> int:
        """FLOPs of the GEMMs of one decode step; attention is bound by its reading."""
        return 2 * rows * (self.layer_weights + self.head_weights)

    def forward_flops(self, tokens: int, picked: int) -> int:
        """FLOPs of one row's forward, causal attention included.

        Args:
            tokens: of the row.
            picked: tokens whose logits are computed.
        """
        gemms = 2 * (tokens * self.layer_weights + picked * self.head_weights)
        return gemms + self.attention_flops(tokens)

    def attention_flops(self, tokens: int) -> int:
        """FLOPs of one row's causal attention: scores and weighted values."""
        return sum(
            count * 4 * layer.width * layer.seen_between(1, tokens)
            for layer, count in Counter(self.layers).items()
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of the device.

    Attributes:
        bandwidth: bytes/s that a reduction kernel reads.
        peak: FLOP/s of a large GEMM.
    """

    bandwidth: float
    peak: float


@dataclass(frozen=True, slots=True)
class DecodeLimit:
    """Least seconds of decode steps.

    Attributes:
        kv_seconds: reading keys and values.
        gemm_seconds: max(reading weights, GEMM arithmetic), step by step.
        weight_seconds: reading weights alone.
    """

    kv_seconds: float
    gemm_seconds: float
    weight_seconds: float

    @property
    def seconds(self) -> float:
        """The sharper limit: GEMMs may be bound by arithmetic."""
        return self.kv_seconds + self.gemm_seconds

    @property
    def reading_seconds(self) -> float:
        """The plain limit: all bytes over the bandwidth."""
        return self.kv_seconds + self.weight_seconds


def decode_limit(
    cost: ModelCost, machine: Machine, rows_per_step: Sequence[int], kv_bytes: int
) -> DecodeLimit:
    """Limit of a sequence of decode steps.

    Args:
        cost: the model's.
        machine: the device's.
        rows_per_step: live rows of each step.
        kv_bytes: keys and values read in all steps.
    """
    reading = cost.weight_bytes / machine.bandwidth
    steps = Counter(rows_per_step)
    return DecodeLimit(
        kv_seconds=kv_bytes / machine.bandwidth,
        gemm_seconds=sum(
            count * max(reading, cost.decode_flops(rows) / machine.peak)
            for rows, count in steps.items()
        ),
        weight_seconds=len(rows_per_step) * reading,
    )


def fixed_decode_limit(
    cost: ModelCost, machine: Machine, rows: int, prompt: int, answer: int
) -> DecodeLimit:
    """Limit of decoding `rows` answers of one length side by side.

    The first token comes from prefill. Step t = 1 ... T - 1 stores the t-th answer token, and
    reads P + t tokens of every row.
    """
    kv_bytes = rows * cost.kv_bytes_between(prompt + 1, prompt + answer - 1)
    return decode_limit(cost, machine, [rows] * (answer - 1), kv_bytes)


def varied_decode_limit(
    cost: ModelCost, machine: Machine, prompt: int, answers: Sequence[int], slots: int
) -> DecodeLimit:
    """Limit of decoding answers of these lengths in an ideal refill of `slots` slots."""
    kv_bytes = sum(cost.kv_bytes_between(prompt + 1, prompt + answer - 1) for answer in answers)
    return decode_limit(cost, machine, ideal_rows(answers, slots), kv_bytes)


def ideal_rows(answers: Sequence[int], slots: int) -> list[int]:
    """Live rows of each decode step where a finished row's slot is refilled at once.

    Answers start in the given order. One of n tokens takes n - 1 decode steps.
    """
    starts = Counter[int]()
    ends = Counter[int]()
    free_at = [0] * slots
    for answer in answers:
        if answer < 2:
            continue  # prefill alone answers it
        start = free_at[0]
        starts[start] += 1
        ends[start + answer - 1] += 1
        heapq.heapreplace(free_at, start + answer - 1)
    rows, live = [], 0
    for step in range(max(free_at)):
        live += starts[step] - ends[step]
        rows.append(live)
    return rows


def prefill_seconds(cost: ModelCost, machine: Machine, rows: int, prompt: int) -> float:
    """Least seconds of running `rows` prompts; only their last tokens need logits."""
    return rows * cost.forward_flops(prompt, 1) / machine.peak
