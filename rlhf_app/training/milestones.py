"""The evaluations on a stage's way, and which weights become its artifact: in every stage alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from rlhf_app.training.best import BestWeights
from rlhf_app.training.checkpoint.checkpointer import Checkpointer
from rlhf_app.training.clock import StageClock
from rlhf_app.training.progress import Progress

Report = TypeVar("Report")


class Milestones(Generic[Report]):
    """Evaluates before the first step, now and then, and after the last.

    Args:
        progress: is told of every evaluation.
        best: chooses among them, by the numbers.
        checkpoints: of the stage.
        clock: is given the time of evaluations and saving.
        every: steps between evaluations on the way; 0: none.
        measure: steps done -> evaluation of the weights as they are.
        numbers: of an evaluation, to choose by.
        save: writes the artifact, of the weights that the evaluation is about.
        untrained: first steps whose weights are not fit to be one.
    """

    def __init__(
        self,
        progress: Progress[Report],
        best: BestWeights,
        checkpoints: Checkpointer,
        clock: StageClock,
        *,
        every: int,
        measure: Callable[[int], Report],
        numbers: Callable[[Report], Mapping[str, float | None]],
        save: Callable[[Report], None],
        untrained: int = 0,
    ) -> None:
        self._progress = progress
        self._best = best
        self._checkpoints = checkpoints
        self._clock = clock
        self._every = every
        self._measure = measure
        self._numbers = numbers
        self._save = save
        self._untrained = untrained

    def look(self, step: int, *, last: bool) -> None:
        """Evaluates where it is time to; the last or the best weights become the artifact.

        Every rank must call, after every step and once before the first. What the checkpoint
        that training goes on from knew of this step is not done again.

        Args:
            step: steps done.
            last: no other follows.
        """
        if not (last or step == 0 or (self._every and step % self._every == 0)):
            return
        progress = self._progress
        self._clock.lap("training")
        if progress.evaluated != step:
            report = self._measure(step)
            fit = step > self._untrained
            chosen = fit and self._best.offer(step, self._numbers(report), last=last)
            progress.note(step, report, chosen=chosen)
            self._clock.lap("evaluation")
            if chosen and self._best.metric is not None:
                # Before the artifact, which can be written again from it.
                self._checkpoints.pin(step)
        if progress.kept_step == step > 0 and progress.kept is not None:
            self._save(progress.kept)
            self._clock.lap("saving")
