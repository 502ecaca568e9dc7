"""Goes over the data of a run once, stage by stage, and counts."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from itertools import chain

from data_sources.counts import SourceCounts
from data_sources.identity import unit_hash
from data_sources.load import refusal
from data_sources.reading_once import ReadOnce
from data_sources.records import Record
from data_sources.seen import SeenText, StageView
from data_sources.source_readers import Reader
from data_sources.stage_data import load_stage_data
from data_sources.stats.length_bias import LengthBias
from data_sources.stats.lengths import Lengths
from data_sources.stats.summary import DataStats, SourceStats, StageStats
from rlhf_app.config.schema import STAGES, RunConfig, StageName
from rlhf_app.errors import ConfigError

EXAMPLES = 3


def collect(
    config: RunConfig,
    read: Reader,
    views: Mapping[StageName, StageView],
    *,
    model: str = "",
    max_bad_fraction: float,
) -> DataStats:
    """Returns the numbers of all sources and stages.

    Each source is read once. A stage that its data cannot serve keeps the reason instead.

    Args:
        config: the run.
        read: reads a source, whatever its share of bad rows.
        views: stage -> how it sees records; {} counts characters.
        model: whose tokenizer the views have.
        max_bad_fraction: the share of unusable rows at which a run would stop.

    Raises:
        ConfigError: there is no source.
    """
    stats = DataStats("tokens" if views else "characters", model)

    def count(records: Iterable[Record], counts: SourceCounts, evaluation: bool) -> None:
        stats.sources.append(_source(records, counts, evaluation, max_bad_fraction))

    read_once = ReadOnce(read, count)
    read_once.read_all(config)
    stats.refusals = read_once.refusals(max_bad_fraction)
    for name in STAGES:
        stats.stages[name] = _stage(config, name, read_once, views.get(name))
    if not stats.sources and not stats.refusals:
        raise ConfigError(stats.stages[STAGES[0]].problem)
    return stats


def _source(
    records: Iterable[Record], counts: SourceCounts, evaluation: bool, limit: float
) -> SourceStats:
    source = SourceStats(counts, evaluation)
    source.stops_a_run = bool(refusal(counts, limit))
    for record in records:
        source.duplicates.add(record)
        source.prompts.add("\n".join(message.content for message in record.messages))
        for text in (record.response, record.chosen, record.rejected):
            if text is not None:
                source.answers.add(text)
        source.identical_pairs += record.is_pair and record.chosen == record.rejected
    return source


def _stage(config: RunConfig, name: StageName, read: Reader, view: StageView | None) -> StageStats:
    stage = StageStats(limit=view.limit if view else None)
    try:
        data = load_stage_data(config, name, read)
    except ConfigError as error:
        stage.problem = str(error)
        return stage
    stage.counts = data.counts.stages[name]
    for place, records in enumerate((data.train, data.evaluation)):
        for record in records:
            stage.by_source.setdefault(record.source, [0, 0])[place] += 1
            _add(stage, name, record, view)
    stage.examples = _few(chain(data.train, data.evaluation))
    return stage


def _few(records: Iterable[Record]) -> list[Record]:
    """The same random few, whatever the order; copies of one record count once."""
    few = heapq.nsmallest(EXAMPLES, records, key=lambda r: unit_hash("example", r.uid))
    return list({record.uid: record for record in few}.values())


def _add(stage: StageStats, name: StageName, record: Record, view: StageView | None) -> None:
    if view is None:
        parts = _characters(record, name)
        longest = max((n for part, n in parts.items() if part != "prompt"), default=0)
        row = parts["prompt"] + longest
    else:
        texts = view.whole(record)
        row = max((len(text.ids) for text in texts), default=0)
        if not texts or row > view.limit:
            # Only these are encoded twice: for their length, and for what becomes of them.
            stage.encoded.update(view.of(record)[1])
        if not texts:
            return
        parts = _tokens(texts)
    for part, length in parts.items():
        stage.lengths.setdefault(part, Lengths()).add(length)
    stage.rows.add(row)
    if name == "reward":
        bias = stage.bias.setdefault(record.source, LengthBias())
        bias.add(parts["chosen"], parts["rejected"])


def _characters(record: Record, name: StageName) -> dict[str, int]:
    parts = {"prompt": sum(len(message.content) for message in record.messages)}
    if name == "sft":
        parts["answer"] = len(record.sft_target or "")
    elif name == "reward":
        parts |= {"chosen": len(record.chosen or ""), "rejected": len(record.rejected or "")}
    return parts


def _tokens(texts: list[SeenText]) -> dict[str, int]:
    parts = {"prompt": texts[0].prompt_tokens}
    for text in texts:
        if text.label != "prompt":
            parts[text.label] = len(text.ids) - text.prompt_tokens
    return parts
