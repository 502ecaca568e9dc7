"""Where the time of a decode step goes: torch.profiler over a few steps of a real rollout."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_app.bench.kernel_kinds import KINDS, cpu_operation_kind, cuda_kernel_kind
from rlhf_app.bench.machine import synchronize
from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.decode_step import DecodeStep
from rlhf_app.hybrid_engine.temporarily import temporarily
from rlhf_app.report.bench_generate import StepSplit

# Steps that run before: kernels compile and graphs are captured in the first ones.
_SKIPPED = 4
_STEPS = {"cuda": 8, "cpu": 4}
_KERNELS_SHOWN = 20


class _StepProfiler:
    """Runs as `DecodeStep.__call__`: profiles steps `_SKIPPED` and later, up to `steps`."""

    def __init__(self, device: torch.device, steps: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities = [torch.profiler.ProfilerActivity.CUDA]
        # Shapes tell attention's products from the others' on the CPU.
        self.profiler = torch.profiler.profile(
            activities=activities, record_shapes=device.type == "cpu"
        )
        self._device = device
        self._left = steps
        self._seen = 0
        self.profiled = 0

    def around(self, run: Any) -> Any:
        def step(decode_step: DecodeStep, *arguments: Any, **named: Any) -> None:
            self._seen += 1
            wanted = self._seen > _SKIPPED and self._left > 0
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
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    step_seconds: float,
) -> StepSplit:
    """Seconds of one decode step by kind of kernel.

    Args:
        generator: warm: it has decoded this batch before.
        prompts: of the length at which the step is looked at.
        params: of the rollout, long enough for the steps.
        step_seconds: of an unprofiled step.
    """
    device = generator.model.device
    watch = _StepProfiler(device, _STEPS[device.type])
    with temporarily([DecodeStep], "__call__", watch.around(DecodeStep.__call__)):
        generator.rollout(prompts, params, max_slots=len(prompts))
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


def steps_needed(device: torch.device) -> int:
    """Answer tokens that a rollout must have to be profiled."""
    return _SKIPPED + _STEPS[device.type] + 1


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
