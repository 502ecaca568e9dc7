"""`rlhf sft`, `rlhf reward`, `rlhf ppo`: one stage, with the flags of `rlhf train`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from rlhf_app.commands.options import Flags
from rlhf_app.commands.train import execute, train

_HELP = {
    "sft": "Stage 1: fine-tune the base model on answers.",
    "reward": "Stage 2: train a reward model on preference pairs.",
    "ppo": "Stage 3: train the policy against the reward model.",
}


def _command(stage: str, text: str) -> Callable[..., None]:
    def run_stage(**values: Any) -> None:
        execute(Flags(values, stages=(stage,)))

    # Typer reads signature and annotations: the flags are those of `train` but the choice of
    # stages.
    hints = get_type_hints(train, include_extras=True)
    signature = inspect.signature(train)
    kept = [
        parameter.replace(annotation=hints[name])
        for name, parameter in signature.parameters.items()
        if name not in ("step", "stages")
    ]
    run_stage.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    run_stage.__annotations__ = {parameter.name: parameter.annotation for parameter in kept}
    run_stage.__name__ = stage
    run_stage.__doc__ = text
    return run_stage


COMMANDS: Mapping[str, Callable[..., None]] = {
    stage: _command(stage, text) for stage, text in _HELP.items()
}
