"""`manifest.json`: which stages are finished, from which settings and inputs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

import rlhf_app
from rlhf_app.config.keys import flatten
from rlhf_app.config.lora import LORA_GROUPS
from rlhf_app.config.rewards import RewardSource
from rlhf_app.config.schema import RunConfig, SourceConfig, StageName
from rlhf_app.data_paths import has_wildcards, source_hash
from rlhf_app.errors import ConfigError
from rlhf_app.fingerprint import content_hash
from rlhf_app.function_hash import function_hash
from rlhf_app.home import expanded
from rlhf_app.run_directory import RunDirectory
from rlhf_app.stage_inputs import stage_inputs
from rlhf_app.training.files import atomic_write_json
from rlhf_app.url_secrets import without_secrets

# Raised whenever the manifest or a stage's result.json changes.
_FORMAT = 2
_GROUPS: dict[StageName, tuple[str, ...]] = {
    "sft": ("seed", "model.", "data.", "sft."),
    "reward": ("seed", "model.", "data.", "reward."),
    "ppo": ("seed", "model.", "data.", "ppo.", "gold.", "hybrid_engine."),
}
# Told by the content of the stage's inputs instead of by name.
_BY_CONTENT = ("model.actor", "model.reward", "data.chat_template")
# They decide how fast, and where, but not what.
_WITHOUT_RESULT = ("data.workers", "data.cache_dir")
_STAGE_DATA = ("data.sft", "data.reward", "data.ppo")
_PACKAGES = ("torch", "deepspeed", "transformers", "peft", "datasets", "tokenizers")


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One stage in the manifest.

    Attributes:
        status: running is also what a killed run leaves behind.
        settings: dotted settings that the stage depends on.
        inputs: name -> content hash of models and data.
        artifact_hash: of what it made; empty until finished.
        started, finished: seconds since the epoch; finished is 0 until then.
        versions: of Python, this program and the libraries that compute.
        git: revision of the program's checkout, or None when it has none.
    """

    status: Literal["running", "finished", "failed"]
    settings: dict[str, object]
    inputs: dict[str, str]
    started: float
    artifact_hash: str = ""
    finished: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    git: str | None = None


class Manifest:
    """The stages of a run directory; every change is written at once.

    Args:
        path: `manifest.json`.
        stages: records read from it.

    Attributes:
        directory: the working directory of the run; relative names in its settings start there.
    """

    def __init__(self, path: Path, stages: dict[StageName, StageRecord]) -> None:
        self._path = path
        self.stages = stages
        self.directory = str(Path.cwd())

    @classmethod
    def load(cls, path: Path, *, force: bool = False) -> Manifest:
        """Read a manifest; a missing file is an empty one.

        Args:
            path: `manifest.json`.
            force: take what another version finished as not finished, and so what a damaged
                file says.

        Raises:
            ConfigError: the file is damaged or of another format.
        """
        if not path.is_file():
            return cls(path, {})
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                if force:
                    return cls(path, {})
                raise ConfigError(
                    f"{path.parent}: was made by another version of this program; use --force to "
                    "redo its stages, or another --output-dir"
                )
            return cls(path, {k: StageRecord(**v) for k, v in content["stages"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            if force:
                return cls(path, {})
            raise ConfigError(
                f"{path}: damaged; use --force to do all stages again, or another --output-dir"
            ) from None

    def put(self, stage: StageName, record: StageRecord) -> None:
        """Replace one stage's record."""
        self.stages[stage] = record
        self.save()

    def drop(self, stage: StageName) -> None:
        """Forget a stage, which is about to be done again."""
        if self.stages.pop(stage, None) is not None:
            self.save()

    def save(self) -> None:
        """Write the file whole."""
        stages = {name: asdict(record) for name, record in self.stages.items()}
        content = {
            "format": _FORMAT,
            "rlhf": rlhf_app.__version__,
            "directory": self.directory,
            "stages": stages,
        }
        atomic_write_json(self._path, content)


def stage_settings(config: RunConfig, stage: StageName) -> dict[str, object]:
    """The settings whose change makes a finished stage stale, as JSON values.

    Names of models and of local data files are left out: `stage_fingerprints` tells them by
    content, so that moving a directory changes nothing. The list of stages belongs to it
    where the stage lives on its share of a split, which depends on who else takes part.
    """
    flat = flatten(config.model_dump(mode="json"))
    own = {
        key: value
        for key, value in flat.items()
        if key.startswith(_GROUPS[stage]) and key not in (*_BY_CONTENT, *_WITHOUT_RESULT)
    }
    read = _data_read(config, stage)
    for key in _STAGE_DATA:
        name = key.removeprefix("data.")
        if name not in read:
            own.pop(key)
            own.pop(f"data.truncation.{name}")
    for group in LORA_GROUPS:
        # What has no effect makes nothing stale: adapters that are off, or, where they are
        # on, the learning rate that theirs replaces.
        unused = f"{group}.learning_rate" if flat[f"{group}.lora.rank"] else f"{group}.lora."
        own = {key: value for key, value in own.items() if not key.startswith(unused)}
    if all(getattr(config.data, name) for name in read):
        for key in ("data.sources", "data.split"):
            own.pop(key)
    elif config.data.split != "shared":
        own["stages"] = flat["stages"]
    for key in ("data.sources", *_STAGE_DATA, "data.eval"):
        if key in own:
            sources: tuple[SourceConfig, ...] = getattr(config.data, key.removeprefix("data."))
            own[key] = [_source_settings(source) for source in sources]
    if stage == "ppo":
        own["ppo.ptx_data"] = [_source_settings(source) for source in config.ppo.ptx_data]
        own["ppo.rewards"] = [_reward_settings(source) for source in config.ppo.rewards]
    return own


def _data_read(config: RunConfig, stage: StageName) -> tuple[StageName, ...]:
    """The stages whose rows a stage reads: its own, and SFT's where PPO mixes them in."""
    mixed = stage == "ppo" and config.ppo.ptx_coef > 0 and not config.ppo.ptx_data
    return ("ppo", "sft") if mixed else (stage,)


def _source_settings(source: SourceConfig) -> dict[str, object]:
    values = source.model_dump(mode="json")
    if expanded(source.path).exists() or has_wildcards(source.path):
        values.pop("path")
    else:
        values["path"] = without_secrets(source.path)
    return values


def _reward_settings(source: RewardSource) -> dict[str, object]:
    """A source without its secrets, and without the name of what its content tells."""
    values = {
        key: without_secrets(value) if isinstance(value, str) else value
        for key, value in source.model_dump(mode="json").items()
    }
    if source.classifier and expanded(source.classifier).exists():
        values["classifier"] = "local"
    return values


def stage_fingerprints(config: RunConfig, run: RunDirectory, stage: StageName) -> dict[str, str]:
    """Content hashes of the models and data that a stage reads; all of them must exist."""
    hashes = {
        f"input {name}": content_hash(where)
        for name, where in stage_inputs(config, run, stage).items()
    }
    used = {"data.eval": config.data.eval}
    for name in _data_read(config, stage):
        own: tuple[SourceConfig, ...] = getattr(config.data, name)
        used |= {f"data.{name}": own} if own else {"data.sources": config.data.sources}
    if stage == "ppo":
        used["ppo.ptx_data"] = config.ppo.ptx_data
    for key, sources in used.items():
        for index, source in enumerate(sources):
            hashes[f"{key}[{index}]"] = source_hash(source.path)
            if source.normaliser_file and source.normaliser:
                hashes[f"{key}[{index}].normaliser"] = function_hash(source.normaliser)
    if config.data.chat_template is not None:
        hashes["data.chat_template"] = content_hash(config.data.chat_template)
    if stage == "ppo":
        scorers = {"gold.scorer": function_hash(config.gold.scorer or "")}
        for index, rewards in enumerate(config.ppo.rewards):
            scorers[f"ppo.rewards[{index}]"] = _reward_hash(rewards)
        hashes |= {name: value for name, value in scorers.items() if value}
    return hashes


def _reward_hash(source: RewardSource) -> str:
    """Of what gives the scores; empty for the model of stage 2 and for installed modules."""
    if source.function is not None:
        return function_hash(source.function)
    if source.http is not None:
        # The query may choose the model that scores; the login does not.
        parts = urlsplit(source.http)
        host = parts.netloc.rpartition("@")[2]
        address = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        return hashlib.sha256(address.encode()).hexdigest()
    return content_hash(source.classifier) if source.classifier else ""


def versions() -> dict[str, str]:
    """Versions of what computes, without importing any of it."""
    found = {"python": platform.python_version(), "rlhf": rlhf_app.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Revision of the checkout that this program runs from, `+changes` when it was edited."""
    home = Path(rlhf_app.__file__).resolve().parent.parent
    if not (home / ".git").exists():  # installed: a repository further up is somebody else's
        return None
    try:
        git = ["git", "-C", str(home)]
        head = subprocess.run(  # noqa: S603 - a list of arguments, no shell
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
        changes = subprocess.run(  # noqa: S603 - a list of arguments, no shell
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
