"""Entry point of the `rlhf` command and of `python -m rlhf_app`."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from types import FrameType, TracebackType

from rlhf_app.errors import EXIT_INTERRUPTED
from rlhf_app.url_secrets import without_secrets


def main() -> None:
    """Run the command line and exit with its code."""
    from rlhf_app.cli import run

    # Idle OpenMP threads sleep instead of spinning, here and in every worker. Where another
    # process shares the cores, spinning made a training step of a tiny model 20 times slower.
    # It must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.excepthook = show_error
    interrupt_on_signals()
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt as interrupt:
        print(f"rlhf: interrupted{f' by {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        code = EXIT_INTERRUPTED
    raise SystemExit(code)


def interrupt_on_signals() -> None:
    """SIGTERM and SIGHUP end this process as Ctrl-C does, and those that it forks as ever."""
    controller = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == controller:
            raise KeyboardInterrupt(signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup means it
            signal.signal(number, interrupt)
    # A wish for a checkpoint where no stage trains is no reason to die.
    signal.signal(signal.SIGUSR1, lambda number, frame: None)


def show_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception that nobody caught, as Python does but without secrets."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(without_secrets(text), end="", file=sys.stderr)


if __name__ == "__main__":
    main()
