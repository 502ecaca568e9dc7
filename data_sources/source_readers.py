"""What reads one source under the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from data_sources.counts import SourceCounts
from data_sources.hub import HuggingFaceHub
from data_sources.load import load_source
from data_sources.published import cache_root
from data_sources.record_table import RecordTable
from rlhf_app.config.schema import STAGES, RunConfig, SourceConfig, StageName

# (source, evaluation) -> its records and counts
Reader = Callable[[SourceConfig, bool], tuple[RecordTable, SourceCounts]]


def reader_of(config: RunConfig, *, to_look: bool = False) -> Reader:
    """Returns what reads a source as a run does.

    Args:
        config: the run.
        to_look: sources with too many bad rows are read too.
    """
    data = config.data
    how: dict[str, Any] = {"max_bad_fraction": None} if to_look else {}
    return _loads(config, cache=cache_root(data.cache_dir), workers=data.workers, **how)


def reader_of_first_rows(config: RunConfig, first: int, *, small_whole: bool = False) -> Reader:
    """Returns what reads no more rows of a source than these, and keeps nothing.

    Args:
        config: the run.
        first: rows at most.
        small_whole: small files here are read whole.
    """
    hub = HuggingFaceHub(streaming=config.data.streaming)
    return _loads(config, hub=hub, first=first, small_whole=small_whole)


def own_sources(config: RunConfig, stage: StageName) -> tuple[SourceConfig, ...]:
    """Returns the sources that replace the split for this stage, if any."""
    own: dict[StageName, tuple[SourceConfig, ...]] = {
        "sft": config.data.sft,
        "reward": config.data.reward,
        "ppo": config.data.ppo,
    }
    return own[stage]


def used_sources(config: RunConfig) -> Iterator[tuple[SourceConfig, bool]]:
    """Yields (source, evaluation) of what the stages read; sources that they share come again."""
    for stage in STAGES:
        for source in own_sources(config, stage) or config.data.sources:
            yield source, False
    for source in config.data.eval:
        yield source, True


def _loads(config: RunConfig, **how: Any) -> Reader:
    how = {
        "verbatim": config.data.chat_format == "plain",
        "max_bad_fraction": config.data.max_bad_fraction,
        **how,
    }

    def read(source: SourceConfig, evaluation: bool) -> tuple[RecordTable, SourceCounts]:
        return load_source(source, evaluation=evaluation, **how)

    return read
