"""What is not finite stops every rank before anything is updated, and says what it was.

modelscope/ms-swift#8378: a learning rate too high for PPO makes the loss NaN and the run goes on
with dead weights. The optimizer step's own guards, on two ranks under every ZeRO stage, are in
tests/unit/training/test_scaling.py; here is what a rollout finds.
"""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_app.models.scalar_head import ScoreStats
from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.distributed import Dist
from stages.ppo.reward_sources.combined import WeightedSource
from stages.ppo.rollout_stats import RolloutStats, ScoredAnswers, rollout_sums

KINDS = ("score", "value", "kl", "entropy", "logprob_gap")
FINE = dict.fromkeys(KINDS, 1.0)


class TwoRanks(Dist):
    """One of two ranks, the other of which has only finite numbers."""

    def sum(self, values):
        return [float(value) for value in values]


def rank(cls=Dist):
    return cls(0, 0, 2 if cls is TwoRanks else 1, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_complaint_ms_swift8378_peers15_dsc6_each_kind_is_named_and_stops(kind, bad):
    with pytest.raises(NonFiniteError, match=rf"non-finite {kind} in the rollout on 1 of 2 rank"):
        RolloutStats(FINE | {kind: bad}).check_finite(rank(TwoRanks))


def test_the_rank_that_is_fine_stops_as_well():
    class OtherIsBad(Dist):
        def sum(self, values):
            other = [0.0, 1.0, 0.0, 0.0, 0.0]  # its critic gave NaN
            return [mine + theirs for mine, theirs in zip(values, other, strict=True)]

    with pytest.raises(NonFiniteError, match="non-finite value in the rollout on 1 of 2"):
        RolloutStats(FINE).check_finite(OtherIsBad(0, 0, 2, torch.device("cpu")))


def test_a_rollout_without_a_critic_has_no_values_to_doubt():
    RolloutStats({k: v for k, v in FINE.items() if k != "value"}).check_finite(rank())


def scored(**changes):
    columns = {
        name: torch.tensor([[0.5, 0.25], [1.0, 0.0]])
        for name in ("sampled_NT", "old_NT", "reference_NT", "entropy_NT", "values_NT")
    }
    mask_NT = torch.tensor([[True, True], [True, False]])
    return ScoredAnswers(
        **{"mask_NT": mask_NT, **columns, "scores_N": torch.tensor([1.0, 2.0]), **changes}
    )


@pytest.mark.parametrize(
    ("column", "kind"),
    [("values_NT", "value"), ("entropy_NT", "entropy"), ("old_NT", "logprob_gap")],
)
def test_one_bad_token_shows_and_padding_does_not(column, kind):
    for place, shows in (((0, 1), True), ((1, 1), False)):
        values = torch.zeros(2, 2)
        values[place] = math.nan
        sums = rollout_sums(scored(**{column: values}), torch.zeros(2, 2), torch.zeros(2, 2))
        assert bool(sums[kind].isnan()) == shows, (column, place)


def test_clipping_makes_no_score_of_an_infinite_one():
    raw = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1.0])
    expected = [math.nan, math.nan, math.nan, 5.0, -1.0]
    sources = ScoreStats(mean=0.0, std=1.0), WeightedSource("x", None, clip=5.0)
    for found in (sources[0].normalise(raw, 5.0), sources[1].normalise(raw)):
        assert found.tolist() == pytest.approx(expected, nan_ok=True)
