"""Following metrics.jsonl and showing it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlhf_app.deployment.progress import (
    LiveReporter,
    MetricsTail,
    Pace,
    PlainReporter,
    clock,
    describe,
    make_reporter,
)


def record(step: int, time: float = 0.0, kind: str = "train", **numbers: Any) -> dict[str, Any]:
    return {"step": step, "total_steps": 10, "time": time, "kind": kind, **numbers}


def test_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.new_records() == []
    first, second = json.dumps(record(1)), json.dumps(record(2))
    path.write_text(first + "\n" + second[:9])
    assert [r["step"] for r in tail.new_records()] == [1]
    assert tail.new_records() == []
    with path.open("a") as file:
        file.write(second[9:] + "\n")
    assert [r["step"] for r in tail.new_records()] == [2]


def test_time_left_from_the_records_own_clock() -> None:
    pace = Pace()
    assert pace.seconds_left(record(1, time=100.0)) is None
    # 3 steps took 6 s, 6 remain.
    assert pace.seconds_left(record(4, time=106.0)) == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"loss": 1.23456, "tokens_per_second": 12345.6}, "loss 1.2346, 12,346 tokens/s"),
        ({"reward": 0.5, "loss": None}, "reward 0.500"),
        ({}, ""),
    ],
)
def test_describe(numbers: dict[str, Any], expected: str) -> None:
    assert describe(record(1, **numbers)) == expected


def test_describe_marks_evaluations() -> None:
    assert describe(record(1, kind="eval", accuracy=0.75)) == "evaluation: accuracy 0.750"


def test_a_rounded_zero_has_no_sign() -> None:
    assert describe(record(1, reward=-0.0001, kl_per_answer=-0.001)) == "reward 0.000, KL 0.00 nats"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (200, "3m20s"), (7500, "2h05m")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_plain_lines_are_few() -> None:
    out = io.StringIO()
    with PlainReporter(Console(file=out), "sft", seconds=1000.0) as reporter:
        reporter._last = float("-inf")
        for step in range(1, 11):
            reporter.show(record(step, time=float(step), loss=1.0))
    lines = out.getvalue().splitlines()
    assert lines == [
        "sft: step 1/10  loss 1.0000",
        "sft: step 10/10  loss 1.0000",
    ]


def test_the_terminal_decides_on_the_display() -> None:
    plain = make_reporter(Console(file=io.StringIO()), "sft")
    live = make_reporter(Console(file=io.StringIO(), force_terminal=True), "sft")
    assert (type(plain), type(live)) == (PlainReporter, LiveReporter)


def test_live_display_shows_the_numbers() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    with LiveReporter(console, "ppo") as reporter:
        reporter.show(record(4, time=1.0, reward=0.25))
    assert "4/10" in out.getvalue()
    assert "reward 0.250" in out.getvalue()


def test_tail_of_a_resumed_stage_shows_new_records_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old, new = json.dumps(record(1, time=10.0)), json.dumps(record(2, time=20.0))
    path.write_text(old + "\n" + json.dumps(record(2, time=11.0)) + "\n")
    tail = MetricsTail(path, since=15.0)
    assert tail.new_records() == []
    other = tmp_path / "other"
    other.write_text(old + "\n" + new + "\n")
    other.replace(path)  # another file, and shorter than what was read of the first
    assert [r["time"] for r in tail.new_records()] == [20.0]


def test_tail_passes_over_lines_that_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(record(3))
    path.write_text("# edited by hand\n[1]\n{\n" + '{"time": 1.0}\n{"step": 2}\n' + good + "\n")
    assert [r["step"] for r in MetricsTail(path).new_records()] == [3]
