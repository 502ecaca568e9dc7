"""Entry point of the `rlhf` command and of `python -m rlhf_app`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from rlhf_app.cli import run

    raise SystemExit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
