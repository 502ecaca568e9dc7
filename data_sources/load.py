"""One source to records: read, recognise, normalise, and count what could not be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data_sources.columns import mapped
from data_sources.counts import SourceCounts
from data_sources.custom import LEFT_OUT, custom_shape
from data_sources.fields import Row, RowError
from data_sources.hub import Hub
from data_sources.identity import content_uid, prompt_key
from data_sources.named import NamedDataset, find
from data_sources.normalise import Normalised
from data_sources.raw_rows import BadRow, RawRow
from data_sources.records import Record
from data_sources.shapes import Shape, recognise
from data_sources.sources import is_hub_id, read_source
from data_sources.split import held_out
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError
from rlhf_app.url_secrets import without_secrets

UNEXPECTED = "values are not of the expected kind"
OTHER_SPLIT = "row is of the other split"
FOR_TRAINING = "prompt is in the nine tenths to train on"
# Left out on purpose, whatever their number.
SET_ASIDE = frozenset({OTHER_SPLIT, FOR_TRAINING, LEFT_OUT})
# Held out of datasets that have one split, as DeepSpeed-Chat does (9:1).
_EVALUATION_SHARE = 0.1
_REASONS_SHOWN = 3
_UNEXPECTED = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    StopIteration,
    OverflowError,
    RecursionError,
)


def load_source(
    source: SourceConfig,
    *,
    verbatim: bool,
    max_bad_fraction: float,
    evaluation: bool = False,
    hub: Hub | None = None,
) -> tuple[list[Record], SourceCounts]:
    """Returns (records in file order, counts).

    Args:
        source: path, split, column names and normaliser.
        verbatim: keep texts exactly as they are (the plain chat format).
        max_bad_fraction: largest share of unusable rows.
        evaluation: take the source's test split by default; of known datasets without one, a
            tenth of the prompts.
        hub: where datasets are loaded from; None is the Hugging Face Hub.

    Raises:
        ConfigError: nothing readable, no known shape, no rows, or too many unusable ones.
    """
    counts = SourceCounts(without_secrets(source.path))
    rows = list(read_source(source.path, source.split, evaluation=evaluation, hub=hub))
    rows = mapped(counts.path, rows, source.columns)
    counts.read = len(rows)
    good = [row.values for row in rows if isinstance(row, RawRow)]
    if not rows:
        raise ConfigError(f"data source {counts.path} holds no rows")
    if not good:
        bad = next(row for row in rows if isinstance(row, BadRow))
        raise ConfigError(
            f"data source {counts.path}: none of its {len(rows)} rows can be read "
            f"({bad.where}: {_sample(bad.reason, bad.detail)})"
        )
    known = find(source.path) if is_hub_id(source.path) else None
    shape = custom_shape(source.normaliser) if source.normaliser else known and known.as_shape()
    shape = shape or recognise(counts.path, good, source.columns)
    by_default = known if source.split is None else None
    counts.shape = shape.name
    name = Path(counts.path).name
    records: list[Record] = []
    joined: Iterator[tuple[RawRow | BadRow, int]] = (
        shape.join(rows) if shape.join else ((row, 1) for row in rows)
    )
    for row, size in joined:
        if isinstance(row, RawRow) and _is_of_other_split(by_default, row.values, evaluation):
            row = BadRow(row.where, OTHER_SPLIT, "")
        if isinstance(row, BadRow):
            counts.reject(row.reason, _sample(row.where, row.detail), size)
            continue
        try:
            result = _normalised(shape, row.values, verbatim)
        except RowError as error:
            counts.reject(error.reason, _sample(row.where, error.detail), size)
            continue
        made = result.records
        if evaluation and by_default and by_default.evaluates_on_a_share:
            made = tuple(r for r in made if held_out(prompt_key(r.messages), _EVALUATION_SHARE))
            if not made:
                counts.reject(FOR_TRAINING, row.where, size)
                continue
        counts.notes.update(result.notes)
        for record in made:
            records.append(replace(record, source=name, uid=content_uid(record)))
    counts.records = len(records)
    _check_share(counts, max_bad_fraction)
    return records, counts


def _is_of_other_split(known: NamedDataset | None, row: Row, evaluation: bool) -> bool:
    if known is None or known.row_splits is None:
        return False
    return row.get("split") != known.row_splits[evaluation]


def _normalised(shape: Shape, row: Row, verbatim: bool) -> Normalised:
    """Normalises one row; whatever its values trip over is a reason to count it."""
    try:
        return shape.normalise(row, shape.columns, verbatim)
    except RowError:
        raise
    except _UNEXPECTED as error:
        raise RowError(UNEXPECTED, f"{type(error).__name__}: {error}"[:80]) from error


def _sample(where: str, detail: str) -> str:
    # Values are shown to the user: no half of a surrogate pair, and one line.
    detail = " ".join(detail.encode("utf-8", "backslashreplace").decode("utf-8").split())
    return f"{where}: {detail}" if detail else where


def _check_share(counts: SourceCounts, limit: float) -> None:
    faults = Counter({k: n for k, n in counts.unusable.items() if k not in SET_ASIDE})
    bad = faults.total()
    if bad == 0 or (bad < counts.read and bad <= limit * counts.read):
        return
    reasons = faults.most_common()
    mostly = "; ".join(
        f"{reason} ({number}: {', '.join(counts.samples[reason])})"
        for reason, number in reasons[:_REASONS_SHOWN]
    )
    more = f"; {len(reasons) - _REASONS_SHOWN} more reasons" if reasons[_REASONS_SHOWN:] else ""
    raise ConfigError(
        f"data source {counts.path} (read as {counts.shape}): {bad} of {counts.read} rows are "
        f"unusable, mostly {mostly}{more}; fix the rows (rlhf data stats shows them), or raise "
        f"data.max_bad_fraction ({limit:g})"
    )
