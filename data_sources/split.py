"""Which prompt goes where: by a hash of the prompt, so that data can grow without leaks.

A prompt's place depends on its text alone, not on its position, its source, the seed or the
rows around it. Proportions therefore hold in expectation, and adding or removing rows moves no
other row. Whether a prompt is held out is decided by a second, independent hash that is the
same for every stage: no stage trains on a prompt that another stage evaluates on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from data_sources.identity import unit_hash
from rlhf_app.config.schema import STAGES, StageName


def stage_shares(
    split: tuple[float, float, float], stages: Sequence[StageName]
) -> dict[StageName, float]:
    """Returns stage -> share, summing to 1 over `stages`; empty where all their weights are 0."""
    weights = {name: w for name, w in zip(STAGES, split, strict=True) if name in stages and w > 0}
    total = sum(weights.values())
    return {name: w / total for name, w in weights.items()}


def restricted_shares(
    split: tuple[float, float, float], stages: Sequence[StageName], allowed: Sequence[StageName]
) -> dict[StageName, float]:
    """Returns the shares of a source that may go to some stages only.

    Args:
        split: weights of all stages.
        stages: those that take part.
        allowed: those that the source names; where their weights are all 0 they share equally.
    """
    both = [name for name in stages if name in allowed]
    return stage_shares(split, both) or dict.fromkeys(both, 1 / len(both) if both else 0.0)


def home(claims: Collection[StageName], key: str, shares: Mapping[StageName, float]) -> StageName:
    """Returns the one stage of a prompt that sources would send to several.

    It is the stage that the prompt has without restrictions, if a source sends it there: rows of
    unrestricted sources therefore never move. Else the first of the claims in the order of stages.

    Args:
        claims: stages that the sources with this prompt send it to, at least one.
        key: of the prompt.
        shares: of the split without restrictions.
    """
    if shares and (usual := stage_of(key, shares)) in claims:
        return usual
    return min(claims, key=STAGES.index)


def stage_of(key: str, shares: Mapping[StageName, float]) -> StageName:
    """Returns the stage that owns the prompt with this key (`prompt_key`)."""
    position, upper = unit_hash("stage", key), 0.0
    for name, share in shares.items():
        upper += share
        if position < upper:
            return name
    return name  # the shares' float sum may end just below 1


def held_out(key: str, fraction: float) -> bool:
    """Returns whether the prompt with this key is for evaluation."""
    return unit_hash("evaluation", key) < fraction
