"""Where the time of a decode step goes: torch.profiler over a few steps of a real rollout."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
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
    """Runs as `DecodeStep.__call__`: profiles `steps` of them after the first `skipped`."""

    def __init__(self, device: torch.device, skipped: int, steps: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities = [torch.profiler.ProfilerActivity.CUDA]
        # Shapes tell attention's products from the others' on the CPU.
        self.profiler = torch.profiler.profile(
            activities=activities, record_shapes=device.type == "cpu"
        )
        self._device = device
        self._skipped = skipped
        self._left = steps
        self.profiled = 0

    def around(self, run: Any) -> Any:
        def step(decode_step: DecodeStep, *arguments: Any, **named: Any) -> None:
            wanted = self._skipped <= 0 and self._left > 0
            self._skipped -= 1
            if wanted and not self.profiled:
                synchronize(self._device)
                self.profiler.start()
            run(decode_step, *arguments, **named)
            if wanted:
                self._left -= 1
                self.profiled += 1
                if not self._left:
                    synchronize(self._device)
                    self.profiler.stop()

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
    on_cpu = device.type == "cpu"
    for event in watch.profiler.key_averages(group_by_input_shape=on_cpu):
        if on_cpu:
            microseconds = event.self_cpu_time_total
        elif event.device_type.name == "CUDA":
            microseconds = event.self_device_time_total
        else:
            continue  # the call that launched a kernel has the kernel's time once more
        if microseconds <= 0:
            continue
        kind = (
            cpu_operation_kind(event.key, _dimensions(event))
            if on_cpu
            else cuda_kernel_kind(event.key)
        )
        own = microseconds / 1e6 / watch.profiled
        seconds[kind] += own
        kernels[event.key, kind] += own
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:_KERNELS_SHOWN]
    return StepSplit(
        seconds=seconds,
        step_seconds=step_seconds,
        steps=watch.profiled,
        kernels=[(name, kind, own) for (name, kind), own in longest],
    )


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
