"""Where every file of a run lies.

<out>/config.yaml manifest.json summary.json
<out>/<stage>/metrics.jsonl result.json logs/rank0.log error_rank0.json
<out>/<stage>/checkpoints/   while the stage is unfinished
<out>/ppo/samples.jsonl
<out>/sft/model/  <out>/reward/model/  <out>/ppo/actor/  <out>/ppo/critic/
<out>/ppo/actor_ema/   with `ppo.ema_decay`
<out>/embedded/   the built-in model and data, when the run uses them
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_app.config.schema import JobName, StageName

_ARTIFACTS: dict[StageName, str] = {"sft": "model", "reward": "model", "ppo": "actor"}


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Names paths only; it creates nothing.

    Attributes:
        path: the run's output directory.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.path / "config.yaml"

    @property
    def manifest(self) -> Path:
        """What is finished, from which settings and inputs."""
        return self.path / "manifest.json"

    @property
    def summary(self) -> Path:
        """The final numbers."""
        return self.path / "summary.json"

    @property
    def embedded(self) -> Path:
        """The built-in model and data."""
        return self.path / "embedded"

    def stage(self, stage: JobName) -> Path:
        """The directory of one stage, or of another job of worker processes."""
        return self.path / stage

    def artifact(self, stage: StageName) -> Path:
        """The Hugging Face directory that a stage produces; for PPO that is the actor."""
        return self.stage(stage) / _ARTIFACTS[stage]

    @property
    def critic(self) -> Path:
        """PPO's second product."""
        return self.stage("ppo") / "critic"

    @property
    def samples(self) -> Path:
        """Held-out answers of PPO's policy, one JSON object a line, from every evaluation."""
        return self.stage("ppo") / "samples.jsonl"

    @property
    def actor_ema(self) -> Path:
        """The averaged actor, where `ppo.ema_decay` asks for one."""
        return self.stage("ppo") / "actor_ema"

    def metrics(self, stage: JobName) -> Path:
        """One JSON object a line, written as training goes."""
        return self.stage(stage) / "metrics.jsonl"

    def result(self, stage: JobName) -> Path:
        """Written last by rank 0: a stage that has it is finished."""
        return self.stage(stage) / "result.json"

    def logs(self, stage: JobName) -> Path:
        """The directory of log files."""
        return self.stage(stage) / "logs"

    def log(self, stage: JobName, rank: int) -> Path:
        """What one worker printed."""
        return self.logs(stage) / f"rank{rank}.log"

    def launcher_log(self, stage: JobName) -> Path:
        """What was printed before the workers took over their own logs."""
        return self.logs(stage) / "launcher.log"

    def warnings(self, stage: JobName) -> Path:
        """What rank 0 warned of, a line each, to be shown when the stage has ended."""
        return self.stage(stage) / "warnings.txt"

    def checkpoints(self, stage: StageName) -> Path:
        """The directory of a running stage's checkpoints."""
        return self.stage(stage) / "checkpoints"

    def request(self, stage: JobName) -> Path:
        """What the controller asks of the workers, between two steps."""
        return self.stage(stage) / "request"

    def heartbeats(self, stage: JobName) -> Path:
        """The directory in which workers say what they are doing."""
        return self.stage(stage) / "heartbeats"

    def interrupted(self, stage: JobName) -> Path:
        """Written by rank 0 when the stage stopped because it was asked to."""
        return self.stage(stage) / "interrupted.json"

    def error(self, stage: JobName, rank: int) -> Path:
        """Why one worker failed, as JSON."""
        return self.stage(stage) / f"error_rank{rank}.json"
