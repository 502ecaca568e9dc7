"""Memory that runs out becomes one line; stages that run out of it are in tests/integration."""

from __future__ import annotations

import errno
import itertools
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch

from rlhf_app.config.load import load_config, parse_set, with_values
from rlhf_app.deployment.failures import WorkerError
from rlhf_app.errors import ConfigError
from rlhf_app.preflight import check_sizes
from rlhf_app.training.error_phase import phase_of, within
from rlhf_app.training.memory_advice import Failure, advise
from rlhf_app.training.out_of_memory import OutOfMemory, explained
from rlhf_app.training.phases import PhaseClock

# As torch 2.13, transformers and glibc write them.
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.25 GiB is free. Process 7 has 138.54 GiB memory in use."
)
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)
MEMORY = [
    (torch.OutOfMemoryError(CUDA), "GPU"),
    (torch.cuda.OutOfMemoryError("short"), "GPU"),
    (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), "GPU"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "GPU"),
    (RuntimeError(HOST), "host"),
    (MemoryError(), "host"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
]
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    OSError(errno.ENOSPC, "No space left on device"),
    ConfigError("data.jsonl row 3: out of memory"),
    IndexError("KV workspace holds 3 rows of 5 tokens; 4 rows of 1 were asked for"),
]


@cache
def config(*sets: str):
    return load_config(
        overrides=[
            parse_set(s)
            for s in ("model.actor=a/b", "data.sources=[d]", "deployment.type=single_gpu", *sets)
        ]
    ).config


def line(error: Exception, phase: str | None, *sets: str, stage="ppo", ranks=1) -> str:
    """The message that a stage ends with."""
    inside = nullcontext() if phase is None else within(phase)
    with pytest.raises(OutOfMemory) as caught, explained(config(*sets), stage, ranks), inside:
        raise error
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("error", "where"), MEMORY, ids=lambda value: str(value)[:25])
def test_memory_that_ran_out_is_known_from_other_errors(error, where):
    assert line(error, "generate").startswith(f"ppo: out of {where} memory in rollout")


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as caught, explained(config(), "ppo", 1):
        raise error
    assert caught.value is error


def test_the_whole_line():
    settings = ["ppo.micro_batch_size=4", "ppo.actor.gradient_checkpointing=true"]
    assert line(torch.OutOfMemoryError(CUDA), "actor_forward_backward", *settings) == (
        "ppo: out of GPU memory in update of actor (2.50 GiB wanted, 1.25 GiB of 139.80 GiB free). "
        "Nothing was made smaller by itself; what helps most here: ppo.micro_batch_size 4 -> 2, "
        "hybrid_engine.release_inference_cache false -> true, "
        "ppo.actor.offload_optimizer none -> cpu"
    )
    at_once = WorkerError.from_exception(OutOfMemory("ppo: out of GPU memory"))
    assert at_once.last_line == "OutOfMemory: ppo: out of GPU memory"


def test_the_workspace_of_a_rollout_says_its_own_sizes():
    """Taken in vain twice, it is a RuntimeError of the rollout engine."""
    error = RuntimeError("KV workspace for 3 rows of 5 tokens needs 2760 bytes, free on cuda:0: 99")
    assert "in rollout (2760 bytes wanted for keys and values, 99 free)." in line(error, "generate")


def test_a_wrapped_error_counts_as_what_caused_it():
    wrapped = ConfigError("model.actor a/b: Cannot allocate memory")
    wrapped.__cause__ = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert "out of host memory in model load" in line(wrapped, "load")


def test_the_outermost_phase_is_named():
    clock = PhaseClock(torch.device("cpu"))
    with pytest.raises(ValueError, match="x") as caught, within("evaluation"):  # noqa: SIM117
        with clock.phase("generate"):
            raise ValueError("x")
    assert phase_of(caught.value) == "evaluation"
    with pytest.raises(ValueError, match="x") as caught, clock.phase("generate"):
        raise ValueError("x")
    assert phase_of(caught.value) == "generate"
    assert phase_of(ValueError()) is None


def test_outside_of_every_phase_the_stage_is_named_alone():
    assert line(MemoryError(), None, stage="sft").startswith("sft: out of host memory. Nothing")


PHASES = {
    "sft": ["load", "_forward_backward", "_step", "evaluation", "saving"],
    "reward": ["load", "_forward_backward", "_step", "evaluation", "saving"],
    "ppo": [
        *("load", "generate", "old", "reference", "values", "reward", "actor_forward_backward"),
        *("critic_forward_backward", "ptx_forward_backward", "actor_step", "critic_step"),
        *("evaluation", "saving"),
    ],
}
CASES = [(stage, phase) for stage, phases in PHASES.items() for phase in phases]


@pytest.mark.parametrize(("stage", "phase"), CASES)
def test_three_settings_that_the_checks_let_through(stage, phase):
    """With the presets and far from them, each proposal alone is a run that would start."""
    small = [f"{stage}.micro_batch_size=5", f"{stage}.{'rollout_' * (stage == 'ppo')}batch_size=30"]
    for sets, ranks, error in itertools.product(
        ([], small, ["model.dtype=fp32", f"{stage}.micro_batch_tokens=512"]),
        (1, 2),
        (torch.OutOfMemoryError(CUDA), RuntimeError(HOST)),
    ):
        text = line(error, phase, *sets, stage=stage, ranks=ranks)
        changes = text.partition("what helps most here: ")[2].split(", ")
        assert len(changes) == 3, text
        for change in changes:
            key, present, arrow, proposed = change.split(" ")
            assert arrow == "->"
            assert present != proposed
            before = config(*sets)
            value = "null" if proposed == "unset" else proposed
            changed = with_values(before, {key: parse_set(f"{key}={value}").value})
            assert changed != before
            check_sizes(changed, ranks)


def test_zero_is_advised_only_to_several_ranks():
    error = torch.OutOfMemoryError(CUDA)
    assert "zero_stage" not in line(error, "_step", stage="sft", ranks=1)
    assert "sft.zero_stage 0 -> 2" in line(error, "_step", stage="sft", ranks=2)
    assert "sft.zero_stage 2 -> 3" in line(error, "_step", "sft.zero_stage=2", stage="sft", ranks=2)


def test_the_host_is_not_relieved_by_moving_more_onto_it():
    moved = "sft.offload_optimizer=cpu"
    assert "sft.offload_optimizer cpu -> none" in line(
        RuntimeError(HOST), "_step", moved, stage="sft"
    )
    assert "offload_optimizer" not in line(RuntimeError(HOST), "_step", stage="sft")


def test_nothing_left_to_change():
    least = [
        "model.dtype=bf16", "sft.micro_batch_size=1", "sft.gradient_checkpointing=true",
        "sft.offload_optimizer=cpu", "sft.lora.rank=4", "data.max_length=2",
    ]  # fmt: skip
    text = line(torch.OutOfMemoryError(CUDA), "_forward_backward", *least, stage="sft")
    assert text.endswith("itself; take a smaller model, shorter rows or more devices")
    assert advise(config(*least), Failure("sft", "update")) == []


def test_the_page_names_every_setting_that_is_advised(repo_root: Path):
    page = (repo_root / "docs" / "out_of_memory.md").read_text(encoding="utf-8")
    for (stage, phase), ranks in itertools.product(CASES, (1, 2)):
        text = line(torch.OutOfMemoryError(CUDA), phase, stage=stage, ranks=ranks)
        for change in text.partition("what helps most here: ")[2].split(", "):
            assert f"`{change.split(' ')[0].rpartition('.')[2]}`" in page, change
