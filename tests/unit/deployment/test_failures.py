"""What a failed worker leaves behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rlhf_app.deployment.failures import (
    WorkerError,
    describe_exit,
    first_error,
    killed_rank,
    last_log_line,
    write_error,
)
from rlhf_app.run_directory import RunDirectory


def caught(message: str) -> WorkerError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return WorkerError.from_exception(error)


def test_last_line_names_type_and_first_line_of_the_message() -> None:
    error = caught("bad shape\nmore detail")
    assert error.last_line == "ValueError: bad shape"
    assert error.message == "bad shape\nmore detail"
    assert error.traceback.splitlines()[0] == "Traceback (most recent call last):"


def test_the_earliest_failure_is_the_cause(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    late = dataclasses.replace(caught("connection closed"), time=20.0)
    early = dataclasses.replace(caught("the cause"), time=10.0)
    write_error(run.error("sft", 0), late)
    write_error(run.error("sft", 2), early)
    assert first_error(run, "sft", 4) == (2, early)
    assert first_error(run, "ppo", 4) is None


def test_ranks_that_torchrun_ended_itself_were_not_killed(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    assert killed_rank(log) is None
    entry = "  rank      : {} (local_rank: {})\n  exitcode  : {} (pid: 5)\n"
    log.write_text(entry.format(0, 0, 1) + entry.format(1, 1, -15))
    assert killed_rank(log) is None
    log.write_text(log.read_text() + entry.format(2, 2, -11))
    assert killed_rank(log) == (2, -11)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, "exit code 1"),
        (-9, "killed by SIGKILL (out of memory?)"),
        (-11, "killed by SIGSEGV"),
        (
            -7,
            "killed by SIGBUS (/dev/shm full, or files in data.cache_dir cut while in use?)",
        ),
    ],
)
def test_describe_exit(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_last_log_line_skips_empty_files(tmp_path: Path) -> None:
    empty, full = tmp_path / "a.log", tmp_path / "b.log"
    empty.write_text("\n\n")
    full.write_text("one\n  two  \n\n")
    assert last_log_line([tmp_path / "none.log", empty, full]) == (full, "two")
    assert last_log_line([empty]) is None
