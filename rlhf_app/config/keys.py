"""The dotted names of all settings, and the closest ones to a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import get_args

from pydantic.fields import FieldInfo

from rlhf_app.config.schema import RunConfig, Section


def section_type(field: FieldInfo) -> type[Section] | None:
    """The settings group that a field holds, or None for a plain setting."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        inner = section_type(field)
        yield f"{prefix}{name}", field
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.")


@cache
def all_fields() -> dict[str, FieldInfo]:
    """Every dotted name, groups such as `ppo.actor` included, in schema order."""
    return dict(_walk(RunConfig, ""))


@cache
def setting_keys() -> tuple[str, ...]:
    """The dotted names that hold a value: all but the groups."""
    return tuple(key for key, field in all_fields().items() if section_type(field) is None)


# Of other trainers; any of them would cut the support that the log-probs are computed on.
_NOT_IN_ROLLOUTS = frozenset(
    {"top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"}
)


def did_you_mean(key: str) -> str:
    """A hint such as `; did you mean ppo.kl_coef?`, or an empty string.

    A name that is right but lacks its group (`kl_coef`) finds the full name; otherwise the
    closest spelling wins.
    """
    known = list(all_fields())
    leaf = key.rpartition(".")[2]
    if leaf in _NOT_IN_ROLLOUTS:
        return (
            "; rollouts sample from the whole distribution and have no such setting "
            "(docs/ppo_details.md, 14)"
        )
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if 0 < len(same_leaf) <= 3:
        return f"; did you mean {' or '.join(same_leaf)}?"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        leaves = {name.rpartition(".")[2]: name for name in known}
        close = [leaves[hit] for hit in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
    return f"; did you mean {close[0]}?" if close else ""


def item_did_you_mean(setting: str, key: str) -> str:
    """The same for a setting of an item of a list: `data.sources`, `data.sources[0].wieght`.

    A list whose items have few settings gets all of them where none comes near.
    """
    leaf = key.rpartition(".")[2]
    known = _item_settings(all_fields()[setting].annotation)
    close = difflib.get_close_matches(leaf, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(known)}" if known else ""


def _item_settings(annotation: object) -> list[str]:
    """The names of the settings of the groups inside a type such as tuple[SourceConfig, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return list(annotation.model_fields)
    return [name for inner in get_args(annotation) for name in _item_settings(inner)]


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Turn nested groups into dotted names; lists stay whole.

    Args:
        values: nested settings, for example from `RunConfig.model_dump(mode="json")`.
        prefix: put before every name.
    """
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
