"""Evaluations on the way: the held-out prompts, and where the numbers and samples go."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_sources.examples import PromptExample
from rlhf_app.config.schema import RunConfig
from rlhf_app.hybrid_engine import Generator
from rlhf_app.models.load import load_causal_lm, resolve_dtype
from rlhf_app.scorers import load_scorer
from rlhf_app.training.appended_file import AppendedFile
from rlhf_app.training.distributed import Dist
from rlhf_app.training.error_phase import within
from rlhf_app.training.metrics import MetricsWriter
from stages.ppo.evaluate import PolicyReport, evaluate_policy
from stages.ppo.models import PPOModels


class HeldOut:
    """Evaluates policies on the same prompts, with the same random numbers.

    Args:
        models: reference, reward model and formats.
        prompts: held out, the same list on every rank.
        config: the run.
        dist: process group.
        metrics: is given the numbers of the policy in training.
        samples: file for its answers to the first `ppo.samples` prompts, one JSON object a line;
            older lines are dropped unless `load_state_dict` goes on from them.
        updates: how many there will be.
    """

    def __init__(
        self,
        models: PPOModels,
        prompts: Sequence[PromptExample],
        config: RunConfig,
        dist: Dist,
        *,
        metrics: MetricsWriter,
        samples: Path,
        updates: int,
    ) -> None:
        self._models = models
        self._prompts = prompts
        self._config = config
        self._dist = dist
        self._metrics = metrics
        self._updates = updates
        self._sources: dict[str, float] = {}
        self._gold = load_scorer(config.gold.scorer) if config.gold.scorer else None
        self._samples = AppendedFile(samples, dist.is_main and config.ppo.samples > 0)

    def state_dict(self) -> dict[str, int]:
        """How much of the file of samples is written."""
        return self._samples.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there; later lines are dropped."""
        self._samples.load_state_dict(state)

    @within("evaluation")
    def evaluate(self, update: int, policy: Any) -> PolicyReport:
        """Measure the policy in training, and write its numbers and samples.

        Args:
            update: updates done.
            policy: the actor, or the reference while the actor has its weights.
        """
        report = self._measure(self._models.actor, policy)
        numbers = report.numbers() | self._sources
        self._metrics.write(kind="eval", step=update, total_steps=self._updates, **numbers)
        self._samples.write_lines(
            json.dumps({"step": update, **sample}, ensure_ascii=False)
            for sample in sample_rows(self._prompts[: self._config.ppo.samples], report)
        )
        return report

    @within("evaluation")
    def evaluate_base(self, path: str) -> PolicyReport:
        """Measure the model that SFT started from, then let go of it."""
        config = self._config
        model = load_causal_lm(
            path,
            dtype=resolve_dtype(config.model.dtype, self._dist.device),
            attn_implementation=config.model.attn_implementation,
            trust_remote_code=config.model.trust_remote_code,
            device=self._dist.device,
        ).eval()
        return self._measure(Generator(model, config.hybrid_engine), model)

    def _measure(self, sampler: Any, policy: Any) -> PolicyReport:
        report = evaluate_policy(
            sampler,
            policy,
            self._models,
            self._prompts,
            self._config.ppo,
            self._dist,
            gold=self._gold,
            seed=self._config.seed,
        )
        self._sources = self._models.scorer.take_means()
        return report


def sample_rows(prompts: Sequence[PromptExample], report: PolicyReport) -> list[dict[str, Any]]:
    """The answers to the first prompts, with what was found of each.

    Args:
        prompts: those to show.
        report: of all prompts.

    Returns:
        prompt and answer as text, reward, gold (None without a scorer), kl (nats, summed over
        the answer), tokens (EOS included) and stopped (whether it ends with a stop token).
    """
    return [
        {
            "prompt": prompt.text,
            "answer": row.text,
            "reward": row.reward,
            "gold": row.gold,
            "kl": row.kl,
            "tokens": len(row.tokens),
            "stopped": row.stopped,
        }
        for prompt, row in zip(prompts, report.rows, strict=False)
    ]
