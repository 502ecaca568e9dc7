"""Runs one stage in a process of its own, alone or under torchrun: `stage_runs.py OUT STAGE`.

With TEST_SMALL_ROWS set, data of so many rows is encoded into files.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from data_sources import encode
from rlhf_app.commands.worker import leave
from rlhf_app.config.schema import RunConfig
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training import deepspeed_config


def split_small_weights() -> None:
    """ZeRO-3 would leave weights as small as a test's whole on every rank: nothing to test."""
    build = deepspeed_config.build_config

    def build_split(*args: Any, **settings: Any) -> dict[str, Any]:
        config = build(*args, **settings)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    deepspeed_config.build_config = build_split


if __name__ == "__main__":
    split_small_weights()
    encode.SMALL_ROWS = int(os.environ.get("TEST_SMALL_ROWS", encode.SMALL_ROWS))
    run = RunDirectory(Path(sys.argv[1]))
    config = RunConfig.model_validate_json((run.path / "test_config.json").read_text())
    importlib.import_module(f"stages.{sys.argv[2]}.train").main(config, run)
    leave(0)
