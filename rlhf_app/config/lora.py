"""Settings of LoRA adapters (Hu et al. 2021, arXiv:2106.09685), per model and for all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlhf_app.config.section import Section


def _split_names(value: object) -> object:
    """Let `q_proj,v_proj` stand for the list, as flags write it."""
    if isinstance(value, str) and value != "all-linear":
        return [name for part in value.split(",") if (name := part.strip())]
    return value


TargetModules = Annotated[
    Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)],
    BeforeValidator(_split_names),
]


class LoraDefaults(Section):
    """Adapters of every model of the run; each model's own `lora` group wins."""

    rank: int | None = Field(
        None, ge=0, description="Rank of the adapters of every model; 0 turns them off."
    )
    alpha: float | None = Field(
        None, gt=0, description="Scale of every model's adapters; unset: 32."
    )
    target_modules: TargetModules | None = Field(
        None, description="Adapted layers of every model; unset: all-linear."
    )
    learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate of every model's adapters; unset: each its own."
    )


class LoraSettings(Section):
    """Low-rank adapters of one model: its base is frozen, W x becomes W x + alpha/rank B A x."""

    rank: int = Field(0, ge=0, description="Rank of A and B; 0: no adapters, the model trains.")
    alpha: float = Field(
        32.0,
        gt=0,
        description="The adapter's product is scaled by alpha/rank; the best learning rate then "
        "hardly depends on the rank.",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of the adapters' input.")
    target_modules: TargetModules = Field(
        "all-linear",
        description="Names of the adapted layers, such as q_proj,v_proj; all-linear: every linear "
        "layer but the language-model head.",
    )
    learning_rate: float = Field(
        2e-4,
        gt=0,
        description="Peak learning rate with adapters, instead of the model's learning_rate: "
        "adapters need 10 to 20 times as much.",
    )

    @property
    def enabled(self) -> bool:
        """Whether the model has adapters."""
        return self.rank > 0

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


class CriticLora(LoraSettings):
    """Adapters of the critic; one base then serves the critic and the reward model."""

    dropout: float = Field(
        0.0, ge=0, le=0, description="Always 0: old and new values are one function."
    )
    learning_rate: float = Field(
        1e-4,
        gt=0,
        description="Peak learning rate with adapters, of the value head as well, instead of the "
        "critic's learning_rate.",
    )


class PolicyLora(LoraSettings):
    """Adapters of the actor; one base then serves the actor and the reference."""

    dropout: float = Field(
        0.0, ge=0, le=0, description="Always 0: old, new and reference policy are one function."
    )
    learning_rate: float = Field(
        2e-5,
        gt=0,
        description="Peak learning rate with adapters, instead of the actor's learning_rate.",
    )
    rollout: Literal["unfused", "fused"] = Field(
        "unfused",
        description="unfused: rollouts add the low-rank product, as training does. fused: the "
        "product is added to the base for the rollout and the base then copied back; in bf16 "
        "rounding makes that a slightly different policy than the one trained.",
    )


# The groups that take over the run's defaults.
LORA_GROUPS = ("sft", "reward", "ppo.actor", "ppo.critic")


def apply_defaults(values: Mapping[str, object]) -> dict[str, object]:
    """Copy the run's `lora` group to every model that does not say otherwise.

    Args:
        values: raw settings of a run, as nested mappings.

    Returns:
        A copy in which `sft.lora`, `reward.lora`, `ppo.actor.lora` and `ppo.critic.lora` are
        complete; unchanged where anything on the way is no mapping, for validation to say so.
    """
    defaults = values.get("lora")
    if isinstance(defaults, LoraDefaults):  # built in code, not read from a file
        defaults = defaults.model_dump()
    if not isinstance(defaults, Mapping):
        return dict(values)
    given = {name: value for name, value in defaults.items() if value is not None}
    filled: dict[str, object] = dict(values)
    if given:
        for group in LORA_GROUPS:
            filled = _put(filled, [*group.split("."), "lora"], given)
    return filled


def _put(
    values: Mapping[str, object], path: list[str], given: Mapping[str, object]
) -> dict[str, object]:
    """`values` with `given` under the keys at `path`, where they are not set."""
    if not path:
        return {**given, **values}
    inner = values.get(path[0], {})
    if isinstance(inner, Section):
        inner = inner.model_dump(exclude_unset=True)
    if not isinstance(inner, Mapping):
        return dict(values)
    return {**values, path[0]: _put(inner, path[1:], given)}


def settings_without_effect(
    groups: Mapping[str, LoraSettings], defaults: LoraDefaults
) -> list[str]:
    """What was set about adapters that no model has.

    Args:
        groups: the models' own groups by dotted name.
        defaults: the run's group.

    Returns:
        One sentence per ignored setting.
    """
    found = []
    if not any(group.enabled for group in groups.values()):
        given = defaults.model_dump(exclude={"rank"}, exclude_none=True)
        found += [f"lora.{name} has no effect without --lora-rank" for name in given]
    for path, group in groups.items():
        if group.enabled:
            continue
        for name, field in type(group).model_fields.items():
            own = getattr(group, name) not in (field.default, getattr(defaults, name, None))
            if name != "rank" and own:
                found.append(f"{path}.lora.{name} has no effect without {path}.lora.rank")
    return found
