"""From the list of settings to the scorer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlhf_app.config.rewards import RewardSource, source_names
from rlhf_app.config.schema import PPOConfig, RunConfig
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.load import resolve_dtype
from rlhf_app.models.scalar_head import ScoreStats
from rlhf_app.training.distributed import Dist
from stages.ppo.batching import score_limit
from stages.ppo.reward import RewardScorer
from stages.ppo.reward_sources.classifier import ClassifierReward
from stages.ppo.reward_sources.combined import CombinedScorer, WeightedSource
from stages.ppo.reward_sources.function import FunctionReward
from stages.ppo.reward_sources.http import HttpReward
from stages.ppo.reward_sources.texts import TextSource


def load_text_sources(
    config: RunConfig, dist: Dist, chat_format: ChatFormat
) -> dict[str, TextSource]:
    """Load all sources but the stage-2 model, each under its name.

    Args:
        config: the run.
        dist: process group and device.
        chat_format: the actor's.

    Raises:
        ConfigError: a source does not exist, or is no such source.
    """
    sources = config.ppo.rewards
    return {
        name: _load(source, config, dist, chat_format)
        for name, source in zip(source_names(sources), sources, strict=True)
        if not source.model
    }


def _load(
    source: RewardSource, config: RunConfig, dist: Dist, chat_format: ChatFormat
) -> TextSource:
    if source.function is not None:
        return FunctionReward(source.function)
    if source.http is not None:
        return HttpReward(source.http, timeout=source.timeout, retries=source.retries)
    assert source.classifier is not None
    return ClassifierReward(
        source.classifier,
        label=source.label,
        input=source.input,
        continues_text=chat_format.kind == "plain",
        limit=score_limit(config.ppo, dist),
        dtype=resolve_dtype(config.model.dtype, dist.device),
        device=dist.device,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
    )


def combine(
    settings: PPOConfig,
    model: RewardScorer | None,
    texts: Mapping[str, TextSource],
    chat_format: ChatFormat,
    dist: Dist,
) -> RewardScorer | CombinedScorer:
    """The scorer of a run: the stage-2 model as it is where nothing else is asked for.

    Args:
        settings: of stage 3.
        model: the stage-2 model, or None where it is no source.
        texts: the other sources by name.
        chat_format: the actor's.
        dist: process group and device.
    """
    first = settings.rewards[0]
    if model is not None and first == RewardSource(model=True, name=first.name) and not texts:
        return model
    terms = []
    for name, source in zip(source_names(settings.rewards), settings.rewards, strict=True):
        mean, std, clip = source.mean or 0.0, source.std or 1.0, source.clip
        if source.model:
            assert model is not None
            _, stats = model_source(settings, model.stats)
            mean, std = stats.mean, max(stats.std, stats.std_floor)
            clip = settings.reward_clip if clip is None else clip
        terms.append(
            WeightedSource(
                name=name,
                source=model if source.model and model is not None else texts[name],
                weight=source.weight,
                mean=mean,
                std=std,
                clip=clip,
            )
        )
    return CombinedScorer(terms, settings, chat_format, dist)


def model_source(settings: PPOConfig, stored: ScoreStats) -> tuple[RewardSource, ScoreStats]:
    """The stage-2 model among the sources, and the statistics that its scores are normalised by.

    Args:
        settings: of stage 3; the model is one of its sources.
        stored: statistics stored with the model, in force where the settings name no others.
    """
    source = next(source for source in settings.rewards if source.model)
    stats = stored if source.mean is None else replace(stored, mean=source.mean)
    if source.std is not None:
        stats = replace(stats, std=source.std, std_floor=0.0)
    return source, stats
