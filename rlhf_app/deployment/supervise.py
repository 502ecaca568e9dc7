"""Runs the workers of one stage to their end, or ends them."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from rlhf_app.config.schema import JobName
from rlhf_app.deployment.child_process import start, stop
from rlhf_app.deployment.failures import (
    describe_exit,
    first_error,
    is_lost_peer,
    killed_rank,
    last_log_line,
)
from rlhf_app.deployment.progress import MetricsTail, Reporter, make_reporter
from rlhf_app.deployment.watchdog import Watchdog
from rlhf_app.errors import ConfigError, Interrupted, StageFailed
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training.checkpoint.requests import Request, ask

_POLL_SECONDS = 0.1


def run_workers(
    argv: Sequence[str],
    env: Mapping[str, str],
    run: RunDirectory,
    stage: JobName,
    num_processes: int,
    console: Console,
    *,
    hang_minutes: float | None = None,
) -> bool:
    """Start a stage's processes, show their progress, and see them off.

    Ctrl-C, SIGTERM and SIGHUP ask a stage that trains for a checkpoint and its end; the second
    of them, or one before training began, ends it at once. SIGUSR1 asks for a checkpoint.

    Args:
        argv: command of the worker, or of torchrun with the workers.
        env: their environment.
        run: the run directory; logs, metrics and errors lie there.
        stage: the stage.
        num_processes: workers, to look for the one that failed first.
        console: where progress goes.
        hang_minutes: silence of all workers, once they train, after which they are ended.

    Returns:
        Whether the stage was asked to stop, and was finished all the same.

    Raises:
        Interrupted: it stopped as it was asked to.
        ConfigError: a worker found bad input; the message is its own.
        StageFailed: a worker failed; names rank, cause and log.
        KeyboardInterrupt: the workers were ended at once; they are gone by then.
    """
    log = run.log(stage, 0) if num_processes == 1 else run.launcher_log(stage)
    with _noted_signals() as noted:
        process = start(argv, env, log)
        try:
            with make_reporter(console, stage) as reporter:
                tail = MetricsTail(run.metrics(stage), since=time.time())
                watchdog = Watchdog(run.heartbeats(stage), hang_minutes)
                control = _Control(run.request(stage), console, noted)
                complaint = _follow(process, tail, reporter, control, watchdog)
        finally:
            stop(process)
    _show_warnings(run, stage, console)
    if complaint is not None:
        raise StageFailed(f"{stage}: {complaint} (log: {run.log(stage, 0)})")
    if run.interrupted(stage).is_file():
        raise Interrupted(**json.loads(run.interrupted(stage).read_text(encoding="utf-8")))
    if process.returncode != 0:
        raise _failure(run, stage, num_processes, process.returncode)
    if not run.result(stage).is_file():
        raise StageFailed(f"{stage}: ended without a result (log: {run.log(stage, 0)})")
    return control.asked_to_stop


def _show_warnings(run: RunDirectory, stage: JobName, console: Console) -> None:
    if run.warnings(stage).is_file():
        for line in run.warnings(stage).read_text(encoding="utf-8").splitlines():
            console.print(f"{stage}: warning: {line}", style="yellow", markup=False)


class _Control:
    """Passes on to the workers what signals to the controller ask for.

    Args:
        request: file that the workers look for between two steps.
        console: where to say so.
        noted: signals that came, in order; taken from here.
    """

    def __init__(self, request: Path, console: Console, noted: list[signal.Signals]) -> None:
        self._request = request
        self._console = console
        self._noted = noted
        self.asked_to_stop = False

    def act(self, *, training: bool) -> None:
        """Take up what has come since the last call.

        Args:
            training: whether there is anything that a checkpoint would save.

        Raises:
            KeyboardInterrupt: the workers are to be ended at once.
        """
        while self._noted:
            number = self._noted.pop(0)
            if number == signal.SIGUSR1:
                if not self.asked_to_stop:  # which brings a checkpoint
                    ask(self._request, Request.CHECKPOINT)
            elif self.asked_to_stop or not training:
                raise KeyboardInterrupt(number.name)
            else:
                self.asked_to_stop = True
                ask(self._request, Request.STOP)
                self._console.print(
                    f"{number.name}: stopping after this step, with a checkpoint; once more stops "
                    "at once",
                    markup=False,
                    highlight=False,
                )


def _follow(
    process: subprocess.Popen[bytes],
    tail: MetricsTail,
    reporter: Reporter,
    control: _Control,
    watchdog: Watchdog,
) -> str | None:
    """Until the process ends; or returns what is wrong with processes that do not end."""
    training = False
    while True:
        control.act(training=training)
        ended = process.poll() is not None
        for record in tail.new_records():
            training = training or record["kind"] == "train"
            reporter.show(record)
        if ended:  # asked before the last read, so that nothing written is missed
            return None
        complaint = watchdog.complaint()
        if complaint is not None:
            return complaint
        time.sleep(_POLL_SECONDS)


def _failure(
    run: RunDirectory, stage: JobName, num_processes: int, code: int
) -> ConfigError | StageFailed:
    found = first_error(run, stage, num_processes)
    killed = killed_rank(run.launcher_log(stage))
    if killed is not None and (found is None or is_lost_peer(found[1])):
        rank, signalled = killed
        hint = (
            "; SIGKILL often comes from the kernel's out-of-memory killer, see dmesg"
            if -signalled == signal.SIGKILL
            else ""
        )
        return StageFailed(
            f"{stage}: rank {rank} was {describe_exit(signalled)}{hint} "
            f"(log: {run.log(stage, rank)})"
        )
    if found is not None:
        rank, error = found
        if error.type == ConfigError.__name__:
            return ConfigError(error.message)
        return StageFailed(
            f"{stage}: rank {rank} failed: {error.last_line} (log: {run.log(stage, rank)})"
        )
    logs = [run.log(stage, rank) for rank in range(num_processes)]
    last = last_log_line([*logs, run.launcher_log(stage)])
    where = last[0] if last is not None else logs[0]
    end = f"the log ends with: {last[1]}" if last is not None else "nothing was logged"
    who = "the launcher (torchrun) was " if code < 0 and num_processes > 1 else ""
    return StageFailed(f"{stage}: {who}{describe_exit(code)}; {end} (log: {where})")


@contextmanager
def _noted_signals() -> Iterator[list[signal.Signals]]:
    """Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 are noted, for the loop to act on between two looks.

    Raised where they arrive they could come between the start of a worker and the moment
    that somebody owns it, or cut short the ending of the workers.
    """
    noted: list[signal.Signals] = []

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(signal.Signals(signum))

    # nohup means it. That a shell lets what it starts with & ignore SIGINT is about the keyboard.
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [number for number in _HANDLED if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
