"""Memory that ran out becomes one line: stage, phase, and the settings that help there.

The run stops. Nothing is made smaller and tried again: what gives way (speed, lengths, the
batch, the model) is the user's to choose, and a run that changed itself would not be the one
that its configuration describes.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_app.config.schema import STAGES, JobName, RunConfig
from rlhf_app.training.error_phase import phase_of
from rlhf_app.training.memory_advice import Failure, Phase, advise

_ON_HOST = re.compile(
    r"DefaultCPUAllocator|not enough memory: you tried|Cannot allocate memory", re.IGNORECASE
)
_MESSAGES = re.compile(
    r"CUDA out of memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    rf"|{_ON_HOST.pattern}",
    re.IGNORECASE,
)
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w*i?B|\d+ bytes)")
_FREE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
_WORKSPACE = re.compile(r"needs (\d+) bytes, free on (\w+)(?::\d+)?: (\d+|unknown)")

# By the names that `within` and the clocks give; a model's name may come before the last two.
_PHASES: dict[str, Phase] = {
    "load": "model load",
    "generate": "rollout",
    "old": "scoring",
    "values": "scoring",
    "reward": "scoring",
    "advantages": "scoring",
    "reference": "reference forward",
    "forward_backward": "update",
    "step": "optimizer step",
    "evaluation": "evaluation",
    "saving": "saving",
}


class OutOfMemory(RuntimeError):
    """No memory was left; the message names the stage, the phase and the settings that help."""


@contextmanager
def explained(config: RunConfig, job: JobName, world_size: int) -> Iterator[None]:
    """Turns memory that runs out in the body into `OutOfMemory`; other errors pass.

    Args:
        config: the run's settings, whose present values are named.
        job: the stage; errors of other jobs pass as well.
        world_size: number of ranks: ZeRO helps only where there are several.
    """
    try:
        yield
    except Exception as error:
        cause = _cause(error)
        if cause is None or job not in STAGES:
            raise
        on_host = isinstance(cause, MemoryError | OSError) or bool(_ON_HOST.search(str(cause)))
        model, phase = _phase(phase_of(error))
        failure = Failure(job, phase, model, on_host=on_host, world_size=world_size)
        raise OutOfMemory(_line(config, failure, str(cause))) from error


def _cause(error: BaseException | None) -> BaseException | None:
    """The first of an exception and its causes that says that memory ran out."""
    while error is not None:
        if (
            isinstance(error, MemoryError)
            or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
            or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
            # The first lines: C++ stacks below them may name anything.
            or (isinstance(error, RuntimeError) and _MESSAGES.search(str(error)[:1000]))
            or (isinstance(error, RuntimeError) and _WORKSPACE.search(str(error)))
        ):
            return error
        error = error.__cause__
    return None


def _phase(name: str | None) -> tuple[str | None, Phase | None]:
    """Model and phase: `critic_forward_backward` is the critic's update."""
    if name is None:
        return None, None
    if name in _PHASES:
        return None, _PHASES[name]
    for ending in ("forward_backward", "step"):
        if name.endswith(f"_{ending}"):
            return name.removesuffix(f"_{ending}") or None, _PHASES[ending]
    return None, None


def _line(config: RunConfig, failure: Failure, text: str) -> str:
    whose = f" of {failure.model}" if failure.model else ""
    where = f" in {failure.phase}{whose}" if failure.phase else ""
    changes = [
        f"{c.key} {_shown(c.present)} -> {_shown(c.proposed)}" for c in advise(config, failure)
    ]
    advice = (
        f"what helps most here: {', '.join(changes)}"
        if changes
        else "take a smaller model, shorter rows or more devices"
    )
    memory = "host memory" if failure.on_host else "GPU memory"
    return (
        f"{failure.stage}: out of {memory}{where}{_sizes(text)}. Nothing was made smaller by "
        f"itself; {advice}"
    )


def _sizes(text: str) -> str:
    """What was wanted and what was there, where the error says so."""
    if found := _WORKSPACE.search(text):
        wanted, _, free = found.groups()
        return f" ({wanted} bytes wanted for keys and values, {free} free)"
    parts = []
    if found := _WANTED.search(text):
        parts.append(f"{found[1]} wanted")
    if found := _FREE.search(text):
        parts.append(f"{found[2]} of {found[1]} free")
    return f" ({', '.join(parts)})" if parts else ""


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
