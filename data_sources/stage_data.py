"""The records that one stage trains and evaluates on.

Rows of `data.sources` are split over the run's stages by a hash of their prompt; a stage with
data of its own (`data.sft`, `data.reward`, `data.ppo`) takes all of that instead. A share of the
prompts is held out, by a second hash, unless `data.eval` gives the evaluation data: then no
prompt in it is trained on. Every rank computes the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from data_sources.blend import (
    MOST_REPEATS,
    Weighted,
    copies,
    in_order,
    most_rows,
    take_rates,
)
from data_sources.counts import OVER_CAP, DataCounts, SourceCounts, StageCounts
from data_sources.identity import prompt_key
from data_sources.load import load_source
from data_sources.records import Record
from data_sources.split import held_out, home, restricted_shares, stage_of, stage_shares
from rlhf_app.config.schema import STAGES, RunConfig, SourceConfig, StageName
from rlhf_app.errors import ConfigError

# (source, evaluation) -> its records and counts
Reader = Callable[[SourceConfig, bool], tuple[list[Record], SourceCounts]]

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
        train: records in blend order, repeated as weights ask.
        evaluation: records of prompts that are not in `train`, each once.
        counts: what became of every row.
    """

    train: list[Record]
    evaluation: list[Record]
    counts: DataCounts


def reader_of(config: RunConfig) -> Reader:
    """Returns what reads one source under the run's settings."""

    def read(source: SourceConfig, evaluation: bool) -> tuple[list[Record], SourceCounts]:
        return load_source(
            source,
            verbatim=config.data.chat_format == "plain",
            max_bad_fraction=config.data.max_bad_fraction,
            evaluation=evaluation,
        )

    return read


def load_stage_data(config: RunConfig, stage: StageName, read: Reader | None = None) -> StageData:
    """Reads, splits and blends the data of one stage.

    Args:
        config: the whole run; `stage` is one of its stages.
        stage: whose data.
        read: reads a source; None is `reader_of(config)`.

    Raises:
        ConfigError: a source cannot be used, or nothing is left to train or to evaluate on.
    """
    data, counts = config.data, DataCounts()
    own = own_sources(config, stage)
    sources = own or data.sources
    if not sources:
        raise ConfigError(f"no data for {stage}; give --data, or --{stage}-data")
    read = read or reader_of(config)
    items = _read(read, sources, counts, evaluation=False)
    given_eval = _read(read, data.eval, counts, evaluation=True)

    mine = items if own else _split(config, stage, items, counts)
    part = counts.stages.setdefault(stage, StageCounts())
    part.candidates = len(mine) + part.dropped[ELSEWHERE] + len(given_eval)
    suitable = _suitable(mine, stage, part.dropped)
    if data.eval:
        evaluation = _suitable(given_eval, stage, part.dropped)
        reserved = {item.key for item in evaluation}
        training = [item for item in suitable if item.key not in reserved]
        part.dropped[IN_EVALUATION] += len(suitable) - len(training)
    else:
        reserved = {item.key for item in suitable if held_out(item.key, data.eval_fraction)}
        training = [item for item in suitable if item.key not in reserved]
        evaluation = [item for item in suitable if item.key in reserved]

    result = StageData(
        _blended(training, config, part),
        _evaluated(evaluation, stage, config, part),
        counts,
    )
    part.train, part.evaluation = len(result.train), len(result.evaluation)
    part.dropped = +part.dropped
    _refuse_empty(config, stage, part)
    return result


def load_text(config: RunConfig, read: Reader | None = None) -> tuple[list[Record], Counter[str]]:
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
        return data.train, Counter(data.counts.dropped("sft"))
    read, counts, part = read or reader_of(config), DataCounts(), StageCounts()
    items = _read(read, config.ppo.ptx_data, counts, evaluation=False)
    if config.data.eval:
        given = _read(read, config.data.eval, counts, evaluation=True)
        reserved = {item.key for item in given}
    else:
        reserved = {item.key for item in items if held_out(item.key, config.data.eval_fraction)}
    kept = [item for item in items if item.key not in reserved]
    part.dropped[IN_EVALUATION] += len(items) - len(kept)
    records = _blended(kept, config, part)
    if not records:
        raise ConfigError("ppo.ptx_data: no row is left that is not held out: name more of them")
    return records, +part.dropped


def own_sources(config: RunConfig, stage: StageName) -> tuple[SourceConfig, ...]:
    """Returns the sources that replace the split for this stage, if any."""
    own: dict[StageName, tuple[SourceConfig, ...]] = {
        "sft": config.data.sft,
        "reward": config.data.reward,
        "ppo": config.data.ppo,
    }
    return own[stage]


def _read(
    read: Reader, sources: Sequence[SourceConfig], counts: DataCounts, *, evaluation: bool
) -> list[Weighted]:
    items: list[Weighted] = []
    for place, source in enumerate(sources):
        records, source_counts = read(source, evaluation)
        kept = most_rows(records, source.max_rows)
        if len(records) > len(kept):
            source_counts.notes[OVER_CAP] = len(records) - len(kept)
        counts.sources.append(source_counts)
        if source.prompts_only:
            kept = [_prompt_of(record) for record in kept]
        items += [
            Weighted(r, prompt_key(r.messages), source.weight, place, source.only_stages)
            for r in kept
        ]
    return items


def _prompt_of(record: Record) -> Record:
    """The record without its answers; it keeps its uid, and with it its place in the order."""
    ids = record.ids and replace(record.ids, response=(), chosen=(), rejected=())
    return replace(record, response=None, chosen=None, rejected=None, margin=None, ids=ids)


def _split(
    config: RunConfig, stage: StageName, items: list[Weighted], counts: DataCounts
) -> list[Weighted]:
    """Returns the stage's part, and counts everyone's."""
    sharing = [s for s in config.stages if not own_sources(config, s)] or [stage]
    if config.data.split == "shared":
        parts = {
            name: [item for item in items if not item.stages or name in item.stages]
            for name in sharing
        }
        for name, part in parts.items():
            counts.stages[name] = StageCounts(candidates=len(part))
        return parts[stage]
    shares = stage_shares(config.data.split, sharing)
    if stage not in shares and not any(stage in item.stages for item in items):
        numbers = ",".join(f"{share:g}" for share in config.data.split)
        raise ConfigError(
            f"stage {stage} has share 0 in --data-split {numbers}; give it a share or "
            f"--{stage}-data, or leave it out with --stages"
        )
    parts = {name: [] for name in sharing}
    claims: dict[str, set[StageName]] = {}
    restricted = any(item.stages for item in items)
    for item in items:
        own = restricted_shares(config.data.split, sharing, item.stages) if item.stages else shares
        if own:
            claim = stage_of(item.key, own)
            parts[claim].append(item)
            if restricted:
                claims.setdefault(item.key, set()).add(claim)
    for name, part in parts.items():
        counts.stages[name] = StageCounts(candidates=len(part))
    if not restricted:
        return parts[stage]
    mine = [item for item in parts[stage] if home(claims[item.key], item.key, shares) == stage]
    counts.stages[stage].dropped[ELSEWHERE] = len(parts[stage]) - len(mine)
    return mine


def _suitable(items: list[Weighted], stage: StageName, dropped: Counter[str]) -> list[Weighted]:
    kept = [item for item in items if _suits(item.record, stage)]
    dropped[UNSUITABLE[stage]] += len(items) - len(kept)
    return kept


def _suits(record: Record, stage: StageName) -> bool:
    if stage == "sft":
        return record.sft_target is not None
    if stage == "reward":
        return record.is_pair
    return True


def _blended(items: list[Weighted], config: RunConfig, part: StageCounts) -> list[Record]:
    taken: list[tuple[Record, int]] = []
    seed, blend = config.seed, config.data.blend
    weights = {item.source: item.weight for item in items}
    rows = Counter(item.source for item in items)
    rates = take_rates(
        list(weights.values()), [rows[i] for i in weights], blend.temperature, blend.exhaustion
    )
    rate_of = dict(zip(weights, rates, strict=True))
    if blend.exhaustion == "all_exhausted" and max(rates, default=0) > MOST_REPEATS:
        raise ConfigError(
            f"data.blend.exhaustion = all_exhausted would repeat rows {max(rates):.0f} times; "
            "give the sources more equal weights, or cap the large one with max_rows"
        )
    for item in items:
        rate = rate_of[item.source]
        number = copies(item if rate == item.weight else replace(item, weight=rate), seed)
        part.dropped[WEIGHTED_OUT] += number == 0
        part.repeated += max(number - 1, 0)
        taken += [(item.record, copy) for copy in range(number)]
    return in_order(taken, seed)


def _evaluated(
    items: list[Weighted], stage: StageName, config: RunConfig, part: StageCounts
) -> list[Record]:
    """Each record once (each prompt once for PPO), the same ones whatever else is loaded."""
    unique: dict[str, Record] = {}
    for item in items:
        unique.setdefault(item.key if stage == "ppo" else item.record.uid, item.record)
    part.dropped[REPEATED] += len(items) - len(unique)
    # The order does not depend on the run's seed: other seeds are compared on the same rows.
    ordered = in_order(((record, 0) for record in unique.values()), seed=0)
    limit = config.data.eval_limit
    part.dropped[OVER_LIMIT] += max(len(ordered) - limit, 0)
    return ordered[:limit]


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
        fix = f"--data-split {shown} (or shared), --{stage}-data, --eval-data"
    what = "evaluate on" if part.train else "train on"
    raise ConfigError(f"stage {stage} has nothing to {what} ({numbers}); see {fix}")
