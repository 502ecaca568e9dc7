"""Which models a stage starts from: those named by the user, or what earlier stages made."""

from __future__ import annotations

from rlhf_app.config.rewards import uses_model
from rlhf_app.config.schema import RunConfig, StageName
from rlhf_app.errors import ConfigError
from rlhf_app.models.hub_names import is_local_path
from rlhf_app.run_directory import RunDirectory

OPT_REWARD_BASE = "facebook/opt-350m"


def stage_inputs(config: RunConfig, run: RunDirectory, stage: StageName) -> dict[str, str]:
    """Name the models that a stage reads: directories or Hub ids.

    A stage that is planned or finished in this run takes part with its artifact, so the
    answer is the same before, during and after the run.

    Args:
        config: the run's settings.
        run: its directory.
        stage: the stage that asks.

    Returns:
        sft `{"model"}`; reward `{"model"}` (the base of the RM); ppo
        `{"actor", "reward", "base"}`, without "reward" where `ppo.rewards` does not name the
        reward model.

    Raises:
        ConfigError: a model is needed that is neither named nor made by this run.
    """
    base = config.model.actor
    if base is None:
        raise ConfigError("model.actor is unset: name the base model with --actor-model")
    if stage == "sft":
        return {"model": base}
    policy = str(run.artifact("sft")) if _made(config, run, "sft") else base
    if stage == "reward":
        return {"model": config.model.reward or default_reward_base(base) or policy}
    if not uses_model(config.ppo.rewards):
        return {"actor": policy, "base": base}
    if _made(config, run, "reward"):
        reward = str(run.artifact("reward"))
    elif config.model.reward is not None:
        reward = config.model.reward
    else:
        raise ConfigError(
            "PPO needs a reward model: run the reward stage into the same --output-dir, "
            "name one with --reward-model, or another source with --reward-source"
        )
    return {"actor": policy, "reward": reward, "base": base}


def default_reward_base(actor: str) -> str | None:
    """OPT actors from the Hub get DeepSpeed-Chat's small OPT as the base of the RM."""
    if is_local_path(actor) or not actor.lower().startswith("facebook/opt-"):
        return None
    return OPT_REWARD_BASE


def _made(config: RunConfig, run: RunDirectory, stage: StageName) -> bool:
    return stage in config.stages or run.result(stage).is_file()
