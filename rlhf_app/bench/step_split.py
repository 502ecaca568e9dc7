"""Where the time of a decode step goes: torch.profiler over a few steps of a real rollout."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from rlhf_app.bench.kernel_kinds import KINDS, cpu_operation_kind, cuda_kernel_kind
from rlhf_app.bench.machine import synchronize
from rlhf_app.hybrid_engine.decode_step import DecodeStep
from rlhf_app.hybrid_engine.temporarily import temporarily
from rlhf_app.report.bench_generate import StepSplit

# Steps looked at, in the middle of a rollout: there rows have their mean length.
_STEPS = {"cuda": 8, "cpu": 4}
_KERNELS_SHOWN = 20


class _StepProfiler:
    """Runs as `DecodeStep.__call__`: profiles `steps` of them after the first `skipped`.

    Each has a profiler of its own: what runs between steps, such as a prefill, is not theirs.
    """

    def __init__(self, device: torch.device, skipped: int, steps: int) -> None:
        self._device = device
        self._skipped = skipped
        self._steps = steps
        self.profiles: list[torch.profiler.profile] = []

    def around(self, run: Any) -> Any:
        on_cuda = self._device.type == "cuda"
        kind = torch.profiler.ProfilerActivity
        activities = [kind.CUDA if on_cuda else kind.CPU]

        def step(decode_step: DecodeStep, *arguments: Any, **named: Any) -> None:
            self._skipped -= 1
            if self._skipped >= 0 or len(self.profiles) == self._steps:
                run(decode_step, *arguments, **named)
                return
            # Shapes tell attention's products from the others' on the CPU.
            profile = torch.profiler.profile(activities=activities, record_shapes=not on_cuda)
            synchronize(self._device)
            with profile:
                run(decode_step, *arguments, **named)
                synchronize(self._device)
            self.profiles.append(profile)

        return step


def split_decode_step(
    rollout: Callable[[], object], device: torch.device, total_steps: int, step_seconds: float
) -> StepSplit:
    """Seconds of one decode step by kind of kernel.

    Args:
        rollout: makes one, warm: as it did before.
        device: that it runs on.
        total_steps: decode steps that it takes.
        step_seconds: of an unprofiled step.
    """
    steps = min(_STEPS[device.type], total_steps)
    watch = _StepProfiler(device, (total_steps - steps) // 2, steps)
    with temporarily([DecodeStep], "__call__", watch.around(DecodeStep.__call__)):
        rollout()
    seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    kernels: dict[tuple[str, str], float] = defaultdict(float)
    for name, kind, own in chain.from_iterable(map(_kernels_of, watch.profiles)):
        seconds[kind] += own / len(watch.profiles)
        kernels[name, kind] += own / len(watch.profiles)
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:_KERNELS_SHOWN]
    return StepSplit(
        seconds=seconds,
        step_seconds=step_seconds,
        steps=len(watch.profiles),
        kernels=[(name, kind, own) for (name, kind), own in longest],
    )


def _kernels_of(profile: torch.profiler.profile) -> Iterator[tuple[str, str, float]]:
    """Name, kind and seconds of the kernels of one step."""
    on_cpu = torch.profiler.ProfilerActivity.CPU in profile.activities
    for event in profile.key_averages(group_by_input_shape=on_cpu):
        if on_cpu:
            kind = cpu_operation_kind(event.key, _dimensions(event))
            yield event.key, kind, event.self_cpu_time_total / 1e6
        elif event.device_type.name == "CUDA":
            # Not the call that launched the kernel: it has the kernel's time once more.
            yield event.key, cuda_kernel_kind(event.key), event.self_device_time_total / 1e6


def _dimensions(event: Any) -> int | None:
    shapes = [shape for shape in event.input_shapes or [] if shape]
    return max(map(len, shapes)) if shapes else None


def seconds_of(run: Any, device: torch.device) -> tuple[float, Any]:
    """Wall seconds of a call, the device's work included, and what it returned."""
    synchronize(device)
    began = time.perf_counter()
    result = run()
    synchronize(device)
    return time.perf_counter() - began, result
