"""Settings of stage 3 that were changed and that another setting leaves without effect."""

from __future__ import annotations

from rlhf_app.config.ppo import PPOConfig


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
    fields = PPOConfig.model_fields
    return [
        f"ppo.{name} has no effect with {because}"
        for name, because in ignored.items()
        if getattr(ppo, name) != fields[name].default
    ]
