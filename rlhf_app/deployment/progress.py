"""Shows how a stage gets on: a live line on a terminal, occasional plain lines elsewhere."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PLAIN_SECONDS = 15.0


class MetricsTail:
    """Reads what was added to a `metrics.jsonl` since the last look.

    A stage that goes on after an interruption puts another file in its place.

    Args:
        path: the file; it may not exist yet.
        since: leave out records that were written earlier, in seconds since the epoch.
    """

    def __init__(self, path: Path, since: float = 0.0) -> None:
        self._path = path
        self._since = since
        self._file = 0
        self._offset = 0

    def new_records(self) -> list[dict[str, Any]]:
        """Whole lines added since the last call; a line still being written waits."""
        try:
            with self._path.open("rb") as file:
                number = os.fstat(file.fileno()).st_ino
                if number != self._file:
                    self._file, self._offset = number, 0
                file.seek(self._offset)
                block = file.read()
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for record in map(_record, whole.splitlines()) if self._is_new(record)]

    def _is_new(self, record: Mapping[str, Any]) -> bool:
        """Whether a line is of this start; lines that somebody else wrote are of none."""
        return {"step", "total_steps", "kind"} <= record.keys() and record["time"] >= self._since


def _record(line: bytes) -> dict[str, Any]:
    """A line as it was written; without a time, and hence passed over, where it is no record."""
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) and isinstance(values.get("time"), float) else {}


class Reporter(Protocol):
    """Shows training records of one stage; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, record: Mapping[str, Any]) -> None:
        """Take one line of metrics.jsonl."""


def make_reporter(console: Console, stage: str) -> Reporter:
    """A live display where the console is a terminal, else plain lines."""
    return LiveReporter(console, stage) if console.is_terminal else PlainReporter(console, stage)


class PlainReporter:
    """A line at the first and last step, at evaluations, and every 15 seconds between.

    Args:
        console: where to print.
        stage: shown first.
        seconds: least time between two lines.
    """

    def __init__(self, console: Console, stage: str, seconds: float = PLAIN_SECONDS) -> None:
        self._console = console
        self._stage = stage
        self._seconds = seconds
        self._last = 0.0
        self._pace = Pace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, record: Mapping[str, Any]) -> None:
        """Print the record if it is time."""
        eta = self._pace.seconds_left(record)
        step, total = record["step"], record["total_steps"]
        due = time.monotonic() - self._last >= self._seconds or step == total
        if due or record["kind"] == "eval":
            self._last = time.monotonic()
            text = f"{self._stage}: step {step}/{total}  {describe(record)}"
            if eta:
                text += f"  {clock(eta)} left"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveReporter:
    """One line that is redrawn: stage, bar, step, numbers, time left.

    Args:
        console: a terminal.
        stage: shown first.
    """

    def __init__(self, console: Console, stage: str) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn(f"[bold]{stage}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}", markup=False),
            TextColumn("{task.fields[left]}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task(stage, total=1, numbers="starting", left="")
        self._pace = Pace()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, record: Mapping[str, Any]) -> None:
        """Redraw with the record's numbers."""
        eta = self._pace.seconds_left(record)
        self._progress.update(
            self._task,
            completed=record["step"],
            total=record["total_steps"],
            numbers=describe(record),
            left=f"{clock(eta)} left" if eta else "",
        )


class Pace:
    """Estimates the time left from the records' own times."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def seconds_left(self, record: Mapping[str, Any]) -> float | None:
        """Seconds to the last step, or None before two steps are known."""
        step, when = record["step"], record["time"]
        if self._first is None or step < self._first[0]:
            self._first = (step, when)
        done = step - self._first[0]
        if done <= 0:
            return None
        seconds: float = (when - self._first[1]) / done * (record["total_steps"] - step)
        return seconds


def describe(record: Mapping[str, Any]) -> str:
    """The telling numbers of a record: reward or loss, KL, accuracy, speed."""
    shown = [
        ("reward", "reward {:z.3f}"),
        ("gold", "gold {:z.3f}"),
        ("kl_per_answer", "KL {:z.2f} nats"),
        ("loss", "loss {:z.4f}"),
        ("perplexity", "perplexity {:z.3f}"),
        ("accuracy", "accuracy {:z.3f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
    ]
    parts = [
        text.format(record[name])
        for name, text in shown
        if isinstance(record.get(name), int | float)
    ]
    prefix = "evaluation: " if record["kind"] == "eval" else ""
    return prefix + ", ".join(parts)


def clock(seconds: float) -> str:
    """Seconds as 45s, 3m20s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
