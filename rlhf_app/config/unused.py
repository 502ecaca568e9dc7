"""Settings of stage 3 that were changed and that another setting leaves without effect."""

from __future__ import annotations

from rlhf_app.config.ppo import PPOConfig
from rlhf_app.config.rewards import uses_model


def ppo_without_effect(ppo: PPOConfig) -> list[str]:
    """One sentence per ignored setting.

    Groups such as `critic` are left out: presets set them for every estimator.
    """
    ignored: dict[str, str] = {}
    if not ppo.has_critic:
        because = f"ppo.advantage_estimator {ppo.advantage_estimator}, which has no critic"
        ignored |= dict.fromkeys(("gae_lambda", "value_clip_range"), because)
    if ppo.kl_controller == "fixed":
        ignored |= dict.fromkeys(("kl_target", "kl_horizon"), "ppo.kl_controller fixed")
    if ppo.kl_penalty == "loss":
        ignored["kl_clamp"] = "ppo.kl_penalty loss"
    if ppo.kl_coef == 0:
        ignored |= dict.fromkeys(("kl_estimator", "kl_penalty", "kl_clamp"), "ppo.kl_coef 0")
    if not ppo.stop_at_eos:
        ignored |= dict.fromkeys(("missing_eos", "missing_eos_penalty"), "ppo.stop_at_eos false")
    elif ppo.missing_eos == "ignore":
        ignored["missing_eos_penalty"] = "ppo.missing_eos ignore"
    if not uses_model(ppo.rewards):
        ignored["reward_clip"] = "ppo.rewards, of which none is the reward model"
    fields = PPOConfig.model_fields
    return [
        f"ppo.{name} has no effect with {because}"
        for name, because in ignored.items()
        if getattr(ppo, name) != fields[name].default
    ]
