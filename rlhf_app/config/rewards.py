"""Settings of what PPO maximises: a weighted sum of reward sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from rlhf_app.config.functions import function_file, names_function
from rlhf_app.config.section import Location, Section
from rlhf_app.url_secrets import without_secrets

if TYPE_CHECKING:
    from rlhf_app.config.schema import RunConfig

RewardKind = Literal["model", "classifier", "function", "http"]
ClassifierInput = Literal["auto", "template", "pair", "text"]

_KINDS: tuple[RewardKind, ...] = ("model", "classifier", "function", "http")
_NAME = re.compile(r"[A-Za-z]\w*")
# Metrics that are called reward_... already; of each classifier also reward_<name>_truncated.
_TAKEN_NAMES = frozenset({"std", "length_correlation", "seconds"})
_TAKEN_ENDING = "_truncated"
_FORMS = (
    "model, module:function, file.py:function, http://..., or the directory or Hub id of a "
    "sequence classifier"
)


class RewardSource(Section):
    """One source of rewards: exactly one of model, classifier, function and http."""

    model: bool = Field(
        False, description="true: the reward model of stage 2 or of --reward-model."
    )
    classifier: Location | None = Field(
        None, description="A sequence-classification model: directory or Hub id."
    )
    function: str | None = Field(
        None,
        description="module:function or file.py:function that takes (prompts, responses) and "
        "returns one number each.",
    )
    http: str | None = Field(
        None,
        description='Address that answers a POST of {"prompts": [...], "responses": [...]} with '
        '{"scores": [...]}.',
    )
    weight: float = Field(1.0, description="Factor in the sum; a negative one makes it a penalty.")
    mean: float | None = Field(
        None,
        description="Subtracted from the raw score. Unset: the statistics stored with the model "
        "of stage 2, else 0.",
    )
    std: float | None = Field(
        None,
        gt=0,
        description="Divides the difference. Unset: the statistics stored with the model of "
        "stage 2, else 1.",
    )
    clip: float | None = Field(
        None,
        gt=0,
        description="(raw - mean) / std is clipped to +-this. Unset: ppo.reward_clip for the "
        "model of stage 2, no clip for the others.",
    )
    name: str | None = Field(
        None, description="In the metric reward_<name>; unset: from the function, model or host."
    )
    label: int | str | None = Field(
        None,
        description="Classifiers with several labels: the one whose log-odds are the score, by "
        "index or name.",
    )
    input: ClassifierInput = Field(
        "auto",
        description="How a classifier reads prompt and answer: in its chat template, as a text "
        "pair, or as one text. auto: the first of these that it has and the prompt allows.",
    )
    timeout: float = Field(10.0, gt=0, description="Seconds that one HTTP request may take.")
    retries: int = Field(
        3, ge=0, description="Further HTTP attempts, after 1, 2, 4, ... seconds (at most 30)."
    )

    @property
    def kind(self) -> RewardKind:
        """Which of the four it is."""
        return next(kind for kind in _KINDS if getattr(self, kind))

    @property
    def local_path(self) -> str:
        """The file or directory (or Hub id) whose content gives the scores, or an empty text."""
        return function_file(self.function) if self.function else self.classifier or ""

    @property
    def shown(self) -> str:
        """What it reads, without secrets."""
        return without_secrets(self.function or self.classifier or self.http or "model")

    @model_validator(mode="after")
    def _one_source(self) -> RewardSource:
        found = [kind for kind in _KINDS if getattr(self, kind)]
        if len(found) != 1:
            raise ValueError(
                "name exactly one of model: true, classifier, function and http"
                + (f", not {' and '.join(found)}" if found else "")
            )
        if self.weight == 0:
            raise ValueError("weight 0 has no effect: leave the source out")
        only = {"label": "classifier", "input": "classifier", "timeout": "http", "retries": "http"}
        for field, kind in only.items():
            if self.kind != kind and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field} is a setting of {kind} sources, not of {self.kind}")
        if self.function is not None and not names_function(self.function):
            raise ValueError(
                f"function {self.function}: expected module:function or file.py:function"
            )
        if self.http is not None:
            _check_address(self.http)
        if self.name is not None and (_NAME.fullmatch(self.name) is None or _is_taken(self.name)):
            raise ValueError(
                f"name {self.name}: expected letters, digits and underscores, and neither "
                f"{', '.join(sorted(_TAKEN_NAMES))} nor an ending {_TAKEN_ENDING}, which other "
                "metrics have"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A saved list stays as short as it was written."""
        values: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        return {key: value for key, value in values.items() if value != fields[key].default}


def _is_taken(name: str) -> bool:
    return name in _TAKEN_NAMES or name.endswith(_TAKEN_ENDING)


def _check_address(address: str) -> None:
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError("http: expected an address such as http://localhost:5000/score")
    plain = address.isascii() and address.isprintable() and " " not in address
    if not plain:
        raise ValueError("http: write spaces and other special characters as %20 and the like")


def parse_reward_source(text: str) -> dict[str, object]:
    """Read the short form of a source, as `--reward-source` has it.

    `model`, an address, `module:function`, `file.py:function`, or a classifier's directory or
    Hub id; each may end in `=weight`, but for addresses with a query, whose own that would be.
    """
    address = text.lower().startswith(("http://", "https://"))
    if address and "?" in text:
        return {"http": text}
    spec, equals, weight = text.rpartition("=")
    values: dict[str, object] = {}
    if equals:
        try:
            values["weight"] = float(weight)
        except ValueError:
            spec = text
    else:
        spec = text
    if not spec.strip():
        raise ValueError(f"expected {_FORMS}")
    if address:
        return {"http": spec, **values}
    if spec == "model":
        return {"model": True, **values}
    if names_function(spec):
        return {"function": spec, **values}
    if ":" in spec:
        raise ValueError(f"{spec}: expected {_FORMS}")
    return {"classifier": spec, **values}


def _expand(value: object) -> object:
    """Let a list hold short forms, and a single source stand alone."""
    items = [value] if isinstance(value, str | dict) else value
    if not isinstance(items, list | tuple):
        return value
    return [parse_reward_source(item) if isinstance(item, str) else item for item in items]


def _check_list(sources: tuple[RewardSource, ...]) -> tuple[RewardSource, ...]:
    if not sources:
        raise ValueError("expected at least one source; the default is [model]")
    if sum(source.model for source in sources) > 1:
        raise ValueError("the model of stage 2 is named twice: give it one weight")
    named = [source.name for source in sources if source.name is not None]
    if len(named) != len(set(named)):
        raise ValueError("two sources have the same name")
    return sources


RewardSources = Annotated[
    tuple[RewardSource, ...], BeforeValidator(_expand), AfterValidator(_check_list)
]
ONLY_MODEL: tuple[RewardSource, ...] = (RewardSource(model=True),)


def uses_model(sources: tuple[RewardSource, ...]) -> bool:
    """Whether the model of stage 2 is among the sources."""
    return any(source.model for source in sources)


def rewards_without_effect(config: RunConfig) -> list[str]:
    """A line for each reward model that is trained or named but scores nothing."""
    if "ppo" not in config.stages or uses_model(config.ppo.rewards):
        return []
    fix = "add the source model (--reward-source model)"
    if "reward" in config.stages:
        return [f"the reward stage's model is no source of rewards: {fix}, or use --step 1 3"]
    if config.model.reward is not None:
        return [f"--reward-model {config.model.reward} is no source of rewards: {fix}"]
    return []


def source_names(sources: tuple[RewardSource, ...]) -> list[str]:
    """The part of each source's metric after `reward_`: its own name, or a telling one.

    No two are the same, and none is that of another metric.
    """
    given = [source.name for source in sources if source.name is not None]
    taken = set(given)
    names = []
    for source in sources:
        name = source.name
        if name is None:
            base, count = _telling_name(source), 1
            name = base
            while name in taken or _is_taken(name):
                count += 1
                name = f"{base}_{count}"
            taken.add(name)
        names.append(name)
    return names


def _telling_name(source: RewardSource) -> str:
    text: str = source.kind
    if source.function is not None:
        text = source.function.rpartition(":")[2].rpartition(".")[2]
    elif source.classifier is not None:
        text = Path(source.classifier).name
    elif source.http is not None:
        text = urlsplit(source.http).hostname or "http"
    return re.sub(r"\W+", "_", text).strip("_") or source.kind
