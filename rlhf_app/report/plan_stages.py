"""What a run would do with the stages that its directory already holds, for the plan."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_app.config.schema import RunConfig, StageName
from rlhf_app.errors import ConfigError
from rlhf_app.manifest import Manifest
from rlhf_app.reuse import Decision, check_nothing_needed_is_removed, decide
from rlhf_app.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class StagesPlan:
    """What becomes of the stages.

    Attributes:
        lines: one for each chosen stage; empty where nothing was done in the directory yet.
        reused: stages that would not run.
        refusal: why the run would stop before the first stage, or None.
    """

    lines: tuple[str, ...] = ()
    reused: frozenset[StageName] = frozenset()
    refusal: str | None = None


def plan_stages(config: RunConfig, run: RunDirectory, *, force: bool) -> StagesPlan:
    """Decide as the run would, and change nothing.

    Args:
        config: the run's settings, with every model and data file in place.
        run: its directory.
        force: as for the run.

    Raises:
        ConfigError: the manifest cannot be read, or the run would remove what it needs.
    """
    if not run.manifest.is_file():
        return StagesPlan()
    manifest = Manifest.load(run.manifest, force=force)
    refusal = None
    try:
        decisions = decide(config, run, manifest, force=force)
    except ConfigError as error:
        refusal = str(error)
        decisions = _with_force(config, run, manifest)
    else:
        check_nothing_needed_is_removed(config, run, decisions)
    return StagesPlan(
        tuple(_line(decision, manifest, force=force) for decision in decisions),
        frozenset(decision.stage for decision in decisions if decision.action == "reuse"),
        refusal,
    )


def _with_force(config: RunConfig, run: RunDirectory, manifest: Manifest) -> list[Decision]:
    try:
        return decide(config, run, manifest, force=True)
    except ConfigError:  # not a matter of force: the refusal says what to do
        return []


def _line(decision: Decision, manifest: Manifest, *, force: bool) -> str:
    record = manifest.stages.get(decision.stage)
    if decision.action == "reuse":
        text = "finished, would be reused"
    elif decision.action == "resume":
        text = "not finished, would go on from its checkpoint"
    elif record is None or record.status != "finished":
        text = "not finished, would run"
    else:
        text = "finished, would be done again" + ("" if force else ", with --force alone")
    return f"{decision.stage}: {text}"
