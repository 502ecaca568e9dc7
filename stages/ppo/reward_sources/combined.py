"""The score of an answer: a weighted sum of sources, then the missing-EOS rule.

Legend: B answers of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist

from data_sources.examples import PromptExample
from rlhf_app.config.schema import PPOConfig
from rlhf_app.hybrid_engine.agreement import Agreement, Terms
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.training.distributed import Dist
from rlhf_app.training.host_copy import to_device
from stages.ppo.experience import Answers
from stages.ppo.reward import RewardScorer, apply_rules
from stages.ppo.reward_sources.classifier import ClassifierReward
from stages.ppo.reward_sources.texts import TextAnswers, TextSource


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
        """clip((raw - mean) / std), any shape."""
        normal_B = (raw_B - self.mean) / self.std
        return normal_B if self.clip is None else normal_B.clamp(-self.clip, self.clip)


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

    @torch.no_grad()
    def __call__(
        self,
        answers: Answers,
        prompts: Sequence[PromptExample],
        responses: Sequence[Sequence[int]],
        stopped: Sequence[bool],
    ) -> torch.Tensor:
        """Weighted sum of the sources' normalised scores, with the missing-EOS rule applied.

        Every rank calls, as often as the others.

        Args:
            answers: layout of `prompts` and `responses` in the actor's ids.
            prompts: the rows' prompts.
            responses: the rows' answers, ragged.
            stopped: whether each answer ends with a stop token.

        Returns:
            fp32 scores_B on the device of `answers`.

        Raises:
            ConfigError: on every rank, where a source gave no usable scores on any of them.
        """
        device = answers.input_ids_BL.device
        raw: dict[str, torch.Tensor] = {}
        # First the stage-2 model: inside a split critic its forward needs every rank.
        for term in self.sources:
            if isinstance(term.source, RewardScorer):
                raw[term.name] = term.source.raw(answers, prompts, responses, stopped)
        error: Exception | None = None
        try:
            texts = TextAnswers(prompts, [self._format.decode(tokens) for tokens in responses])
            for term in self.sources:
                if not isinstance(term.source, RewardScorer):
                    scores = term.source(texts)
                    if not isinstance(scores, torch.Tensor):
                        scores = to_device(torch.tensor(scores, dtype=torch.float32), device)
                    raw[term.name] = scores
        except Exception as caught:
            error = caught
        self._agree(error)
        normal_SB = torch.stack([term.normalise(raw[term.name]) for term in self.sources])
        self._sums += normal_SB.sum(dim=1, dtype=torch.float64)
        self._count += len(prompts)
        scores_B = torch.zeros_like(normal_SB[0])
        for term, normal_B in zip(self.sources, normal_SB, strict=True):
            scores_B += term.weight * normal_B
        return apply_rules(scores_B, responses, stopped, self._settings)

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

    def _agree(self, error: Exception | None) -> None:
        if self._dist.world_size > 1:
            Agreement(torch_dist.group.WORLD).settle(Terms(), error)
        elif error is not None:
            raise error
