"""Runs one stage in a process of its own, alone or under torchrun: `stage_runs.py OUT STAGE`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from rlhf_app.commands.worker import leave
from rlhf_app.config.schema import RunConfig
from rlhf_app.run_directory import RunDirectory

if __name__ == "__main__":
    run = RunDirectory(Path(sys.argv[1]))
    config = RunConfig.model_validate_json((run.path / "test_config.json").read_text())
    importlib.import_module(f"stages.{sys.argv[2]}.train").main(config, run)
    leave(0)
