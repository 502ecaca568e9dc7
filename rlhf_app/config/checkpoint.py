"""When a running stage is saved, and how much of it is kept."""

from __future__ import annotations

from pydantic import Field

from rlhf_app.config.section import Section


class CheckpointConfig(Section):
    """Checkpoints: everything that an interrupted stage needs to go on as if nothing had been."""

    every_steps: int | None = Field(
        None,
        ge=1,
        description="Optimizer steps (PPO: updates) from one checkpoint to the next; unset: "
        "by time alone.",
    )
    every_minutes: float | None = Field(
        30.0,
        gt=0,
        description="Most minutes of work that a crash can cost; unset: by steps alone.",
    )
    at_end: bool = Field(
        True,
        description="One more after the last step, before the artifact is made from it.",
    )
    keep: int = Field(
        2,
        ge=1,
        description="Newest checkpoints to keep; that of the best evaluation stays besides.",
    )
    keep_finished: bool = Field(
        False, description="Leave them when the stage is finished; else they are removed then."
    )

    @property
    def enabled(self) -> bool:
        """Whether there are any, but for those that are asked for while a stage runs."""
        return self.at_end or self.every_steps is not None or self.every_minutes is not None
