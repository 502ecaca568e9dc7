"""The records that one stage trains and evaluates on.

Rows of `data.sources` are split over the run's stages by a hash of their prompt; a stage with
data of its own (`data.sft`, `data.reward`, `data.ppo`) takes all of that instead. A share of the
prompts is held out, by a second hash, unless `data.eval` gives the evaluation data: then no
prompt in it is trained on. Every rank computes the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from data_sources.blend import MOST_REPEATS, copies, in_order, most_rows, take_rates
from data_sources.counts import OVER_CAP, DataCounts, SourceCounts, StageCounts
from data_sources.load import streamed_source
from data_sources.record_stream import RecordStream, StreamedSource
from data_sources.record_table import RecordTable
from data_sources.selection import Selected
from data_sources.source_readers import Reader, own_sources, reader_of, reader_of_first_rows
from data_sources.split import are_held_out, at_home, restricted_shares, stage_shares, stages_of
from rlhf_app.config.schema import STAGES, RunConfig, SourceConfig, StageName
from rlhf_app.errors import ConfigError
from rlhf_app.url_secrets import without_secrets

UNSUITABLE: dict[StageName, str] = {
    "sft": "no answer to imitate (SFT)",
    "reward": "no pair of answers (reward)",
    "ppo": "no prompt (ppo)",
}
ELSEWHERE = "prompt belongs to another stage, which other sources have it for"
IN_EVALUATION = "prompt is in the evaluation data"
WEIGHTED_OUT = "left out by the source's weight"
REPEATED = "repeated in the evaluation data"
OVER_LIMIT = "beyond data.eval_limit"


@dataclass(frozen=True, slots=True)
class StageData:
    """What a stage works on.

    Attributes:
        train: records in blend order, repeated as weights ask; with `data.streaming` without an
            end.
        evaluation: records of prompts that are not in `train`, each once.
        counts: what became of every row.
    """

    train: Selected | RecordStream
    evaluation: Selected
    counts: DataCounts


def load_stage_data(config: RunConfig, stage: StageName, read: Reader | None = None) -> StageData:
    """Reads, splits and blends the data of one stage.

    Args:
        config: the whole run; `stage` is one of its stages.
        stage: whose data.
        read: reads a source; None is `reader_of(config)`.

    Raises:
        ConfigError: a source cannot be used, or nothing is left to train or to evaluate on.
    """
    if config.data.streaming and read is None:
        return _streamed(config, stage)
    data, counts = config.data, DataCounts()
    own = own_sources(config, stage)
    sources = own or data.sources
    if not sources:
        raise ConfigError(f"no data for {stage}; give --data, or --{stage}-data")
    read = read or reader_of(config)
    rows = _read(read, sources, counts, evaluation=False)
    given_eval = _read(read, data.eval, counts, evaluation=True)

    mine = rows if own else _split(config, stage, rows, sources, counts)
    part = counts.stages.setdefault(stage, StageCounts())
    part.candidates = len(mine) + part.dropped[ELSEWHERE] + len(given_eval)
    suitable = _suitable(mine, stage, part.dropped)
    if data.eval:
        evaluation = _suitable(given_eval, stage, part.dropped)
        reserved_N = np.isin(suitable.keys_N, evaluation.keys_N)
        part.dropped[IN_EVALUATION] += int(reserved_N.sum())
    else:
        reserved_N = are_held_out(suitable.keys_N, data.eval_fraction)
        evaluation = suitable.take(np.flatnonzero(reserved_N))
    training = suitable.take(np.flatnonzero(~reserved_N))

    result = StageData(
        _blended(training, sources, config, part),
        _evaluated(evaluation, stage, config, part),
        counts,
    )
    part.train, part.evaluation = len(result.train), len(result.evaluation)
    part.dropped = +part.dropped
    _refuse_empty(config, stage, part)
    return result


def _streamed(config: RunConfig, stage: StageName) -> StageData:
    """The first rows of each source give the evaluation, and say whether there is any at all."""
    data = config.data
    whole = reader_of(config)
    first = reader_of_first_rows(config, data.look_ahead)

    def read(source: SourceConfig, evaluation: bool) -> tuple[RecordTable, SourceCounts]:
        return (whole if evaluation else first)(source, evaluation)

    head = load_stage_data(config, stage, read)
    given = _read(whole, data.eval, DataCounts(), evaluation=True)
    given_N = _suitable(given, stage, Counter()).keys_N
    own = own_sources(config, stage)
    sharing = [s for s in config.stages if not own_sources(config, s)] or [stage]
    shares = None if own or data.split == "shared" else stage_shares(data.split, sharing)

    def wanted(table: RecordTable) -> NDArray[np.bool_]:
        suits_N = {"sft": table.has_answer_N, "reward": table.is_pair_N}.get(stage)
        found_N = np.ones(len(table), dtype=bool) if suits_N is None else suits_N
        if shares is not None:
            found_N = found_N & (stages_of(table.keys_N, shares) == STAGES.index(stage))
        if data.eval:
            return found_N & ~np.isin(table.keys_N, given_N)
        return found_N & ~are_held_out(table.keys_N, data.eval_fraction)

    steps, rows_per_step = _asked_for(config, stage)
    opening = partial(
        streamed_source,
        verbatim=data.chat_format == "plain",
        max_bad_fraction=data.max_bad_fraction,
    )
    sources = [
        StreamedSource(without_secrets(source.path), opening(source), source.weight)
        for source in own or data.sources
    ]
    stream = RecordStream(
        sources,
        wanted,
        seed=config.seed,
        buffer=data.shuffle_buffer,
        rows=steps * rows_per_step,
        rows_per_step=rows_per_step,
    )
    return replace(head, train=stream)


def _asked_for(config: RunConfig, stage: StageName) -> tuple[int, int]:
    """Steps of a stage, set as the configuration check has seen, and the rows of each."""
    if stage == "ppo":
        ppo = config.ppo
        return ppo.updates or 1, ppo.rollout_batch_size // ppo.answers_per_prompt
    settings = config.sft if stage == "sft" else config.reward
    return settings.max_steps or 1, settings.batch_size


def load_text(config: RunConfig, read: Reader | None = None) -> tuple[Selected, Counter[str]]:
    """Reads the text that PPO mixes in: `ppo.ptx_data`, else the rows of SFT.

    Prompts that any stage holds out are left out here as well, and those of `data.eval`.

    Args:
        config: the whole run.
        read: reads a source; None is `reader_of(config)`.

    Returns:
        (records in blend order, reasons of rows left out). Records of plain text are prompts
        without an answer.

    Raises:
        ConfigError: a source cannot be used, or nothing is left.
    """
    if not config.ppo.ptx_data:
        # A run of PPO alone has no share for SFT: it gets the one that it would have had.
        stages = tuple(name for name in STAGES if name in {*config.stages, "sft"})
        data = load_stage_data(config.model_copy(update={"stages": stages}), "sft", read)
        assert isinstance(data.train, Selected)  # no text from streams: the configuration check
        return data.train, Counter(data.counts.dropped("sft"))
    read, counts, part = read or reader_of(config), DataCounts(), StageCounts()
    rows = _read(read, config.ppo.ptx_data, counts, evaluation=False)
    if config.data.eval:
        given = _read(read, config.data.eval, counts, evaluation=True)
        reserved_N = np.isin(rows.keys_N, given.keys_N)
    else:
        reserved_N = are_held_out(rows.keys_N, config.data.eval_fraction)
    part.dropped[IN_EVALUATION] += int(reserved_N.sum())
    kept = rows.take(np.flatnonzero(~reserved_N))
    records = _blended(kept, config.ppo.ptx_data, config, part)
    if not records:
        raise ConfigError("ppo.ptx_data: no row is left that is not held out: name more of them")
    return records, +part.dropped


def _read(
    read: Reader, sources: Sequence[SourceConfig], counts: DataCounts, *, evaluation: bool
) -> Selected:
    tables: list[RecordTable] = []
    rows: list[NDArray[np.int64]] = []
    for source in sources:
        table, source_counts = read(source, evaluation)
        kept = most_rows(table.uids_N, source.max_rows)
        if len(table) > len(kept):
            source_counts.notes[OVER_CAP] = len(table) - len(kept)
        counts.sources.append(source_counts)
        tables.append(table)
        rows.append(kept)
    return Selected.joined(tables, [source.prompts_only for source in sources], rows)


def _split(
    config: RunConfig,
    stage: StageName,
    rows: Selected,
    sources: Sequence[SourceConfig],
    counts: DataCounts,
) -> Selected:
    """Returns the stage's part, and counts everyone's."""
    sharing = [s for s in config.stages if not own_sources(config, s)] or [stage]
    allowed = [source.only_stages for source in sources]
    if config.data.split == "shared":
        parts: dict[StageName, NDArray[np.int64]] = {}
        for name in sharing:
            open_to = np.array([not only or name in only for only in allowed], dtype=bool)
            parts[name] = np.flatnonzero(open_to[rows.table_N])
            counts.stages[name] = StageCounts(candidates=len(parts[name]))
        return rows.take(parts[stage])
    shares = stage_shares(config.data.split, sharing)
    restricted = [only for only, times in zip(allowed, _per_table(rows), strict=True) if times]
    if stage not in shares and not any(stage in only for only in restricted):
        numbers = ",".join(f"{share:g}" for share in config.data.split)
        raise ConfigError(
            f"stage {stage} has share 0 in --data-split {numbers}; give it a share or "
            f"--{stage}-data, or leave it out with --stages"
        )
    claims_N = np.full(len(rows), -1, dtype=np.int8)
    keys_N = rows.keys_N
    for number, only in enumerate(allowed):
        own = restricted_shares(config.data.split, sharing, only) if only else shares
        if own:
            places = np.flatnonzero(rows.table_N == number)
            claims_N[places] = stages_of(keys_N[places], own)
    for name in sharing:
        claimed = int((claims_N == STAGES.index(name)).sum())
        counts.stages[name] = StageCounts(candidates=claimed)
    if not any(restricted):
        return rows.take(np.flatnonzero(claims_N == STAGES.index(stage)))
    mine = at_home(keys_N, claims_N, stage, shares)
    counts.stages[stage].dropped[ELSEWHERE] = counts.stages[stage].candidates - len(mine)
    return rows.take(mine)


def _suitable(rows: Selected, stage: StageName, dropped: Counter[str]) -> Selected:
    if stage == "ppo":
        dropped[UNSUITABLE[stage]] += 0
        return rows
    kept = np.flatnonzero(rows.has_answer_N if stage == "sft" else rows.is_pair_N)
    dropped[UNSUITABLE[stage]] += len(rows) - len(kept)
    return rows.take(kept)


def _blended(
    rows: Selected, sources: Sequence[SourceConfig], config: RunConfig, part: StageCounts
) -> Selected:
    seed, blend = config.seed, config.data.blend
    there = [(i, number) for i, number in enumerate(_per_table(rows)) if number]
    weights = [sources[i].weight for i, _ in there]
    rates = take_rates(
        weights, [number for _, number in there], blend.temperature, blend.exhaustion
    )
    if max(rates, default=0) > MOST_REPEATS:
        source = sources[there[int(np.argmax(rates))][0]]
        cause = f"weight {source.weight:g} of {without_secrets(source.path)}"
        if blend.exhaustion != "weights":
            cause += f" with data.blend.exhaustion = {blend.exhaustion}"
        raise ConfigError(
            f"{cause} would repeat rows {max(rates):.0f} times; {MOST_REPEATS} is the most: give "
            "the sources more equal weights, or cap the large one with max_rows"
        )
    uids_N, copies_N = rows.uids_N, np.zeros(len(rows), dtype=np.int64)
    for (number, _), rate in zip(there, rates, strict=True):
        places = np.flatnonzero(rows.table_N == number)
        copies_N[places] = copies(uids_N[places], rate, seed)
    left_out = int((copies_N == 0).sum())
    part.dropped[WEIGHTED_OUT] += left_out
    part.repeated += int(copies_N.sum()) - (len(rows) - left_out)
    return rows.take(in_order(uids_N, copies_N, seed))


def _per_table(rows: Selected) -> list[int]:
    """How many rows come from each table."""
    return np.bincount(rows.table_N, minlength=len(rows.tables)).tolist()


def _evaluated(rows: Selected, stage: StageName, config: RunConfig, part: StageCounts) -> Selected:
    """Each record once (each prompt once for PPO), the same ones whatever else is loaded."""
    names_N = rows.keys_N if stage == "ppo" else rows.uids_N
    _, first = np.unique(names_N, return_index=True)
    unique = rows.take(np.sort(first))
    part.dropped[REPEATED] += len(rows) - len(unique)
    # The order does not depend on the run's seed: other seeds are compared on the same rows.
    ordered = in_order(unique.uids_N, np.ones(len(unique), dtype=np.int64), seed=0)
    limit = config.data.eval_limit
    part.dropped[OVER_LIMIT] += max(len(ordered) - limit, 0)
    return unique.take(ordered[:limit])


def _refuse_empty(config: RunConfig, stage: StageName, part: StageCounts) -> None:
    if part.train and part.evaluation:
        return
    lost = "; ".join(f"{n} {reason}" for reason, n in part.dropped.most_common())
    numbers = (
        f"{part.candidates} rows, {part.train} to train on, {part.evaluation} to evaluate on"
        + (f"; {lost}" if lost else "")
    )
    if part.train:
        held = f"data.eval_fraction {config.data.eval_fraction:g} (raise it, or give --eval-data)"
        fix = "--eval-data" if config.data.eval else held
    else:
        split = config.data.split
        shown = split if isinstance(split, str) else ",".join(f"{s:g}" for s in split)
        shared = "" if split == "shared" else " (or shared)"
        fix = f"--data-split {shown}{shared}, --{stage}-data, --eval-data"
    what = "evaluate on" if part.train else "train on"
    raise ConfigError(f"stage {stage} has nothing to {what} ({numbers}); see {fix}")
