"""Which prompt goes where: by a hash of the prompt, so that data can grow without leaks.

A prompt's place depends on its text alone, not on its position, its source, the seed or the
rows around it. Proportions therefore hold in expectation, and adding or removing rows moves no
other row. Whether a prompt is held out is decided by a second, independent hash that is the
same for every stage: no stage trains on a prompt that another stage evaluates on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from data_sources.identity import unit_hash, unit_hashes
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


def stages_of(keys_N: NDArray[np.uint64], shares: Mapping[StageName, float]) -> NDArray[np.int8]:
    """Returns the stages that own prompts, as places in STAGES.

    Args:
        keys_N: uint64, `prompt_key` of each as a number.
        shares: of the stages, at least one.
    """
    places = np.array([STAGES.index(name) for name in shares], dtype=np.int8)
    if len(places) == 1:
        return np.full(len(keys_N), places[0])
    # The shares' float sum may end just below 1: the last one has no upper end.
    upper = list(accumulate(shares.values()))[:-1]
    return places[np.searchsorted(upper, unit_hashes(keys_N, "stage"), side="right")]


def at_home(
    keys_N: NDArray[np.uint64],
    claims_N: NDArray[np.int8],
    stage: StageName,
    shares: Mapping[StageName, float],
) -> NDArray[np.int64]:
    """Returns which of a stage's claims hold where sources send a prompt to several stages.

    A prompt belongs to the stage that it has without restrictions, if a source sends it there:
    rows of unrestricted sources therefore never move. Else to the first of its claims in the order
    of stages.

    Args:
        keys_N: uint64, prompt keys of the rows of all sources.
        claims_N: places in STAGES that their sources send them to, -1 for nowhere.
        stage: whose claims.
        shares: of the split without restrictions.

    Returns:
        Places of rows, in order.
    """
    own = STAGES.index(stage)
    mine = np.flatnonzero(claims_N == own)
    others = [np.isin(keys_N[mine], keys_N[claims_N == i]) for i in range(len(STAGES))]
    rivals = np.flatnonzero(np.sum(others, axis=0) > 1)
    claimed = np.array([other[rivals] for other in others])
    home = np.argmax(claimed, axis=0)
    if shares:
        usual = stages_of(keys_N[mine[rivals]], shares)
        home = np.where(claimed[usual, np.arange(len(usual))], usual, home)
    kept = np.ones(len(mine), dtype=bool)
    kept[rivals] = home == own
    return mine[kept]


def held_out(key: str, fraction: float) -> bool:
    """Returns whether the prompt with this key is for evaluation."""
    return unit_hash("evaluation", key) < fraction


def are_held_out(keys_N: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Returns `held_out` of many prompts, whose keys are given as numbers (uint64)."""
    if fraction == 0:
        return np.zeros(len(keys_N), dtype=bool)
    return unit_hashes(keys_N, "evaluation") < fraction
