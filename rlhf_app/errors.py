"""Errors that a user can fix, and the exit codes that go with them.

Raise `ConfigError` for bad input: one line that names the flag, file, row or setting, then
the fix. The command line prints it without a traceback and exits with 2 (`--debug` shows
the traceback). Our own invariants are `assert`s, not `ConfigError`s.
"""

from __future__ import annotations

from rlhf_app.report.visible import visible

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 3
EXIT_REFUSED = 4


class ConfigError(ValueError):
    """Bad input from the user; the message is one line and names the fix.

    Args:
        message: may quote any text: line breaks become spaces, control characters are written
            out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(visible(" ".join(message.splitlines())))


class StageFailed(RuntimeError):
    """A worker process failed; the message names stage, rank, cause and log file."""


class Interrupted(RuntimeError):
    """A stage stopped because it was asked to.

    Args:
        step: steps done.
        total_steps: of the stage.
        saved: step of the newest checkpoint, from which the stage goes on; 0 without one.
    """

    def __init__(self, step: int, total_steps: int, saved: int) -> None:
        text = f"stopped after step {step} of {total_steps}"
        if saved == step:
            text += ". The same command goes on from there"
        else:
            after = f"after step {saved}" if saved else "from the beginning"
            text += (
                f", and a checkpoint of it could not be written. The same command goes on {after}"
            )
        super().__init__(text)
        self.step = step
        self.total_steps = total_steps
        self.saved = saved
