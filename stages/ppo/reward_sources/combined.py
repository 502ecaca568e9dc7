"""The score of an answer: a weighted sum of sources, then the missing-EOS rule.

Legend: N all answers of this rank, B answers of a batch, S sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist

from data_sources.examples import PromptExample
from rlhf_app.config.schema import PPOConfig
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.agreement import Agreement, Terms
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.training.distributed import Dist
from rlhf_app.training.host_copy import to_device
from stages.ppo.experience import Answers
from stages.ppo.reward import RewardScorer, apply_rules
from stages.ppo.reward_sources.classifier import ClassifierReward
from stages.ppo.reward_sources.texts import TextAnswers, TextSource

#: Places of some answers among those of this rank, and their layout.
Batch = tuple[Sequence[int], Answers]


@dataclass(frozen=True)
class WeightedSource:
    """One term of the sum: weight x clip((raw - mean) / std).

    Attributes:
        name: in the metric reward_<name>.
        source: gives raw scores.
        weight: factor in the sum.
        mean, std: make the raw score comparable.
        clip: bound of the result, or None.
    """

    name: str
    source: RewardScorer | TextSource
    weight: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    clip: float | None = None

    def normalise(self, raw_B: torch.Tensor) -> torch.Tensor:
        """clip((raw - mean) / std), any shape; NaN for an infinite raw."""
        normal_B = (raw_B - self.mean) / self.std
        if self.clip is not None:
            normal_B = normal_B.clamp(-self.clip, self.clip)
        # The clip must not make an ordinary score of an overflow.
        return torch.where(raw_B.isfinite(), normal_B, torch.nan)


class CombinedScorer:
    """Scores answers by several sources, or by one that is not the stage-2 model alone.

    Args:
        sources: terms of the sum; the stage-2 model at most once among them.
        settings: missing-EOS rule.
        actor_format: decodes the actor's ids.
        dist: process group. An error of one rank's source is raised on every rank: the others
            would wait for it in the next collective.
    """

    def __init__(
        self,
        sources: Sequence[WeightedSource],
        settings: PPOConfig,
        actor_format: ChatFormat,
        dist: Dist,
    ) -> None:
        assert sources
        self.sources = tuple(sources)
        self._settings = settings
        self._format = actor_format
        self._dist = dist
        self._sums = torch.zeros(len(self.sources), dtype=torch.float64, device=dist.device)
        self._count = 0

    def __call__(
        self,
        answers: Answers,
        prompts: Sequence[PromptExample],
        responses: Sequence[Sequence[int]],
        stopped: Sequence[bool],
    ) -> torch.Tensor:
        """Scores of one batch, as fp32 scores_B; `score_all` says the rest.

        Args:
            answers: layout of `prompts` and `responses` in the actor's ids.
            prompts: the rows' prompts.
            responses: the rows' answers, ragged.
            stopped: whether each answer ends with a stop token.
        """
        return self.score_all([(range(len(prompts)), answers)], prompts, responses, stopped)

    @torch.no_grad()
    def score_all(
        self,
        batches: Sequence[Batch],
        prompts: Sequence[PromptExample],
        responses: Sequence[Sequence[int]],
        stopped: Sequence[bool],
        *,
        counted: int | None = None,
    ) -> torch.Tensor:
        """Weighted sum of the sources' normalised scores, with the rules of the score applied.

        The stage-2 model runs batch after batch; a source that reads text is called once, with
        all answers, so that a server or a judge can answer them side by side. Every rank calls,
        with equally many batches.

        Args:
            batches: of the answers below, each in one of them.
            prompts: this rank's prompts.
            responses: this rank's answers, ragged.
            stopped: whether each answer ends with a stop token.
            counted: how many rows are asked for, None for all. The others only keep this rank
                in step in the model's forward: no other source sees them, no mean has them, and
                what is returned for them is no score.

        Returns:
            fp32 scores_N on the training device.

        Raises:
            ConfigError: on every rank, where a source gave no usable scores on any of them.
        """
        device = self._dist.device
        raw: dict[str, torch.Tensor] = {}
        # First the stage-2 model: inside a split critic its forward needs every rank.
        for term in self.sources:
            if isinstance(term.source, RewardScorer):
                raw[term.name] = _by_batch(term.source.raw, batches, prompts, responses, stopped)
        count = len(prompts) if counted is None else counted
        error: Exception | None = None
        try:
            texts = [self._format.decode(tokens) for tokens in responses[:count]]
            for term in self.sources:
                if not isinstance(term.source, RewardScorer):
                    raw_N = torch.zeros(len(prompts), device=device)
                    if count:
                        # Texts of its own: one source must not change what the next one reads.
                        found = term.source(TextAnswers(prompts[:count], list(texts)))
                        raw_N[:count] = _as_tensor(term, found, device)
                    raw[term.name] = raw_N
        except Exception as caught:
            error = caught
        agree(self._dist, error)
        normal_SN = torch.stack([term.normalise(raw[term.name]) for term in self.sources])
        self._sums += normal_SN[:, :count].sum(dim=1, dtype=torch.float64)
        self._count += count
        scores_N = torch.zeros_like(normal_SN[0])
        for term, normal_N in zip(self.sources, normal_SN, strict=True):
            scores_N += term.weight * normal_N
        return apply_rules(scores_N, responses, stopped, self._settings)

    def take_means(self) -> dict[str, float]:
        """Mean of each source since the last call, over all ranks, under its metric name.

        Normalised and clipped, before its weight; of a single source there is none, since the
        reward tells it. For classifiers also the share of answers that were too long for it.
        Every rank calls.
        """
        counts = [float(self._count)]
        truncating = [term for term in self.sources if isinstance(term.source, ClassifierReward)]
        for term in truncating:
            assert isinstance(term.source, ClassifierReward)
            counts.append(float(term.source.truncated))
            term.source.truncated = 0
        count, *rest = self._dist.sum([*counts, *self._sums.tolist()])
        self._sums.zero_()
        self._count = 0
        shares, sums = rest[: len(truncating)], rest[len(truncating) :]
        count = max(count, 1.0)
        means = {
            f"reward_{term.name}_truncated": share / count
            for term, share in zip(truncating, shares, strict=True)
        }
        if len(self.sources) > 1:
            means |= {
                f"reward_{term.name}": total / count
                for term, total in zip(self.sources, sums, strict=True)
            }
        return means


def agree(dist: Dist, error: Exception | None) -> None:
    """End all ranks together where a function of the user failed on one; every rank calls.

    Args:
        dist: process group.
        error: of this rank, or None.

    Raises:
        Exception: `error`, or on the other ranks one of the same kind that names it.
    """
    if dist.world_size > 1:
        Agreement(torch_dist.group.WORLD).settle(Terms(), error)
    elif error is not None:
        raise error


def _as_tensor(
    term: WeightedSource, found: torch.Tensor | list[float], device: torch.device
) -> torch.Tensor:
    """Scores as fp32 on the training device; those of a classifier are that already."""
    if isinstance(found, torch.Tensor):
        return found
    raw_B = torch.tensor(found, dtype=torch.float32)
    for row, whole in enumerate((term.weight * term.normalise(raw_B)).isfinite().tolist()):
        if not whole:
            raise ConfigError(
                f"ppo.rewards source {term.name}: row {row} scored {found[row]:g}, whose weight x "
                "(score - mean) / std is beyond fp32 (3.4e+38): return smaller scores"
            )
    return to_device(raw_B, device)


def score_answers(
    scorer: Callable[..., torch.Tensor],
    batches: Sequence[Batch],
    prompts: Sequence[PromptExample],
    responses: Sequence[Sequence[int]],
    stopped: Sequence[bool],
    *,
    counted: int | None = None,
) -> torch.Tensor:
    """Final scores_N of all answers of this rank, by any scorer; see `CombinedScorer.score_all`."""
    if isinstance(scorer, CombinedScorer):
        return scorer.score_all(batches, prompts, responses, stopped, counted=counted)
    return _by_batch(scorer, batches, prompts, responses, stopped)


def _by_batch(
    score: Callable[..., torch.Tensor],
    batches: Sequence[Batch],
    prompts: Sequence[PromptExample],
    responses: Sequence[Sequence[int]],
    stopped: Sequence[bool],
) -> torch.Tensor:
    scores_N = torch.zeros(len(prompts), device=batches[0][1].input_ids_BL.device)
    for rows, answers in batches:
        scores_B = score(
            answers,
            [prompts[row] for row in rows],
            [responses[row] for row in rows],
            [stopped[row] for row in rows],
        )
        scores_N.index_copy_(0, to_device(torch.tensor(list(rows)), scores_N.device), scores_B)
    return scores_N
