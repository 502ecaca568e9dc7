"""What can be found wrong with reward sources before a worker starts."""

from __future__ import annotations

from pathlib import Path

from rlhf_app.config.functions import names_function
from rlhf_app.config.rewards import RewardSource
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.home import expanded
from rlhf_app.models.hub_names import is_local_path
from rlhf_app.models.shapes import read_model_config

# What the reward stage leaves beside its model.
_OURS = "reward_config.json"


def check_rewards(config: RunConfig) -> None:
    """Functions must be there, classifiers must be classifiers with the label that is named.

    Addresses are not called: their server may start later.

    Args:
        config: the run's settings.

    Raises:
        ConfigError: names the source and the fix.
    """
    if "ppo" not in config.stages:
        return
    for source in config.ppo.rewards:
        if source.function is not None:
            check_scorer("--reward-source", source.function)
        elif source.classifier is not None:
            _check_classifier(source, source.classifier)


def check_scorer(flag: str, scorer: str) -> None:
    """A function of the user must be importable now, not after two stages of training.

    Args:
        flag: what named it, for the error.
        scorer: `module:function` or `file.py:function`.

    Raises:
        ConfigError: it is not.
    """
    if not names_function(scorer):
        raise ConfigError(
            f"{flag} {scorer}: expected module:function or file.py:function, for example "
            "my_scores:politeness"
        )
    source = scorer.rpartition(":")[0]
    if source.endswith(".py") and not _is_file(expanded(source)):
        raise ConfigError(f"{flag} {scorer}: no file {source}")
    from rlhf_app.scorers import load_scorer  # runs the user's code, so only when there is some

    try:
        load_scorer(scorer)
    except ConfigError as error:
        raise ConfigError(f"{flag} {scorer}: {str(error).partition(': ')[2]}") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long for a file
        return False


def _check_classifier(source: RewardSource, name: str) -> None:
    where = f"--reward-source {name}"
    path = expanded(name)
    if not path.exists():
        if is_local_path(name) or (path.parent != Path() and path.parent.is_dir()):
            raise ConfigError(f"{where}: no such directory, and no module:function or http address")
        return  # of the Hub
    if path.is_file():
        raise ConfigError(
            f"{where}: is a file; name a function in it as {name}:function, or a model's directory"
            if name.endswith(".py")
            else f"{where}: is a file; name the directory that holds config.json"
        )
    values = read_model_config(name)
    if values is None:
        raise ConfigError(f"{where}: has no readable config.json; name a Hugging Face model")
    if (path / _OURS).is_file() and (source.mean is None or source.std is None):
        raise ConfigError(
            f"{where}: is a reward model of the reward stage: name it with --reward-model and the "
            "source model, which applies its stored statistics; or set mean and std"
        )
    _check_label(where, source, values.get("id2label"))


def _check_label(where: str, source: RewardSource, labels: object) -> None:
    """By name or index among those that config.json lists; without a list there are two."""
    names = labels if isinstance(labels, dict) and labels else {"0": "LABEL_0", "1": "LABEL_1"}
    listed = ", ".join(f"{index} {name}" for index, name in list(names.items())[:8])
    if source.label is None:
        if len(names) > 1:
            raise ConfigError(
                f"{where}: has {len(names)} labels ({listed}); name the good one in YAML: "
                f"ppo.rewards: [{{classifier: {source.classifier}, label: ...}}]"
            )
        return
    known = {str(name).lower() for name in names.values()} | {str(index) for index in names}
    if str(source.label).lower() not in known:
        raise ConfigError(f"{where}: no label {source.label}; it has {listed}")
