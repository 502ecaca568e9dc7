"""Saves and loads DeepSpeed engines, and prints the types that their files hold; then poison."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint

from rlhf_app.errors import ConfigError
from rlhf_app.training.deepspeed_module import load_deepspeed
from rlhf_app.training.distributed import close, setup
from rlhf_app.training.safe_load import refused_files

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = [(name, stage) for name in DTYPES for stage in range(4) if stage or name == "fp32"]


class Poison:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def engine_of(name: str, stage: int, value: float) -> Any:
    """A linear layer after one step with inputs of that value."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(DTYPES[name])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if name != "fp32":
        config[name] = {"enabled": True}
    if name == "fp16":
        config[name]["initial_scale_power"] = 4  # none of the steps overflows
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = load_deepspeed().initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.full((1, 4), value, dtype=DTYPES[name])).float().sum())
    engine.step()
    return engine


def moments(engine: Any) -> list[torch.Tensor]:
    """Adam's, of all parameters."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return [state["exp_avg"].clone() for state in inner.state.values()]


def main(directory: Path) -> None:
    """Prints one line a case."""
    from deepspeed.accelerator import get_accelerator

    # What fp16 writes does not depend on the device, and this one can compute it.
    kind = type(get_accelerator())
    kind.is_fp16_supported = lambda self: True
    kind.supported_dtypes = lambda self: list(DTYPES.values())
    names = [t.__name__ for t in get_safe_globals() if not str(t.__module__).startswith("torch.")]
    print("allowed", *sorted(names))
    for name, stage in CASES:
        engine = engine_of(name, stage, 1.0)
        place = directory / f"{name}{stage}"
        engine.save_checkpoint(str(place), tag="it", client_state={"update": 7})
        found: set[str] = set()
        for file in place.rglob("*.pt"):
            # Those that neither torch nor the list of this process allows, and the listed.
            with torch.serialization.safe_globals([]):
                listed = get_safe_globals()
                torch.serialization.clear_safe_globals()
                found |= {g.rpartition(".")[2] for g in get_unsafe_globals_in_checkpoint(file)}
                torch.serialization.add_safe_globals(listed)
        print("types", name, stage, *sorted(found))
        saved = moments(engine)
        other = engine_of(name, stage, 0.5)
        assert not all(map(torch.equal, saved, moments(other)))
        path, client = other.load_checkpoint(str(place), tag="it")
        assert path is not None
        assert client["update"] == 7
        assert len(saved) > 0
        assert all(map(torch.equal, saved, moments(other)))
    poison(other, place, directory / "code_was_run")


def poison(engine: Any, place: Path, marker: Path) -> None:
    """Puts code into each file of the last checkpoint in turn."""
    for file in sorted(place.rglob("*.pt")):
        content, state = file.read_bytes(), torch.load(file)
        torch.save({**state, "extra": Poison(marker)}, file)
        try:
            with refused_files("engine"):
                engine.load_checkpoint(str(place), tag="it")
        except ConfigError as error:
            print("refused", error)
        else:
            raise AssertionError(f"{file} was read")
        file.write_bytes(content)


if __name__ == "__main__":
    setup()
    logging.disable(logging.WARNING)
    load_deepspeed()
    main(Path(sys.argv[1]))
    close()
