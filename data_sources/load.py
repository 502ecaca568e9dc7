"""One source to records: read, recognise, normalise, and count what could not be used."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from data_sources.columns import mapped
from data_sources.counts import LEFT_OUT, SourceCounts
from data_sources.custom import FAILED, custom_shape
from data_sources.hub import Hub, HuggingFaceHub
from data_sources.named import find
from data_sources.processes import in_order
from data_sources.published import opened
from data_sources.raw_rows import BadRow, RawRow, Rows
from data_sources.record_stream import BLOCK_ROWS, Opened
from data_sources.record_table import ListedRecords, RecordTable
from data_sources.records import Record
from data_sources.row_maker import RowMaker, sample
from data_sources.shapes import Shape, recognise
from data_sources.source_identity import is_large, is_small_file, source_identity, source_state
from data_sources.sources import is_hub_id, read_source
from data_sources.stored_records import StoredRecords, packed, write_records
from data_sources.suggested_columns import HEADLESS, is_headless
from rlhf_app.config.schema import SourceConfig
from rlhf_app.cores import own_cores
from rlhf_app.errors import ConfigError
from rlhf_app.url_secrets import without_secrets

log = logging.getLogger(__name__)

_REASONS_SHOWN = 3
# Looked at for the shape of a source and for columns of other names.
_FIRST_ROWS = 10_000
# Handed to a process at a time.
_PART_ROWS = 2_000


def load_source(
    source: SourceConfig,
    *,
    verbatim: bool,
    max_bad_fraction: float | None,
    evaluation: bool = False,
    hub: Hub | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    first: int | None = None,
    small_whole: bool = False,
) -> tuple[RecordTable, SourceCounts]:
    """Returns (records in file order, counts).

    A large source is read once for all processes and starts, and its records lie in files.

    Args:
        source: path, split, column names and normaliser.
        verbatim: keep texts exactly as they are (the plain chat format).
        max_bad_fraction: largest share of bad rows; None lets any number pass, to look at them.
        evaluation: take the source's test split by default; of known datasets without one, a
            tenth of the prompts.
        hub: where datasets are loaded from; None is the Hugging Face Hub.
        cache: directory for the records of large sources; None keeps all in memory.
        workers: processes that make them; None is the cores that are left for each rank.
        first: read no more rows than this.
        small_whole: of small sources read all, whatever `first` says.

    Raises:
        ConfigError: nothing readable, no known shape, no rows, too many unusable ones, a large
            source that changes meanwhile, or the cache cannot be written to.
    """
    counts = SourceCounts(without_secrets(source.path))
    rows = read_source(source.path, source.split, evaluation=evaluation, hub=hub)
    if first is not None and not (small_whole and is_small_file(rows)):
        rows = islice(rows, first)
    name, state = None, None
    if cache is not None and is_large(rows):
        state = source_state(source, rows)
        name = source_identity(
            source, rows, verbatim=verbatim, evaluation=evaluation, known=cache / "contents"
        )
    if cache is None or name is None:
        maker, joined = _recognised(source, rows, counts, verbatim, evaluation)
        table = ListedRecords(maker.records(joined, counts))
        _check_share(counts, max_bad_fraction)
        return table, counts

    def build(folder: Path) -> str:
        log.info("reading %s once, for all processes: %s", counts.path, folder.parent)
        began = time.perf_counter()
        maker, joined = _recognised(source, rows, counts, verbatim, evaluation)
        parts = iter(lambda: list(islice(joined, _PART_ROWS)), [])
        with closing(in_order(partial(packed, maker), parts, workers or own_cores())) as made:
            write_records(folder, maker.source, made, counts)
        # Else these records would be found under the name of what was there before.
        if source_state(source, rows) != state:
            raise ConfigError(f"data source {counts.path} changed while it was read; start again")
        _check_share(counts, max_bad_fraction)
        seconds = time.perf_counter() - began
        log.info("read %d rows of %s in %.0f s", counts.read, counts.path, seconds)
        return f"{counts.records} records of {counts.path}"

    stored = opened(cache / "records", name, build, StoredRecords)
    # It may have been read under another address of the same content.
    found = replace(stored.counts, path=counts.path)
    _check_share(found, max_bad_fraction)
    return stored, found


def streamed_source(source: SourceConfig, *, verbatim: bool, max_bad_fraction: float) -> Opened:
    """Returns what opens a source whose rows are read while training goes on.

    The share of unusable rows is looked at every thousand rows: the end may be days away.

    Args:
        source: as for `load_source`.
        verbatim: the same.
        max_bad_fraction: the same.
    """

    def opened_source(counts: SourceCounts) -> Iterator[Record]:
        rows = read_source(source.path, source.split, hub=HuggingFaceHub(streaming=True))
        maker, joined = _recognised(source, rows, counts, verbatim, evaluation=False)
        if maker.shape.join is not None:
            raise ConfigError(
                f"data source {counts.path}: {maker.shape.name} are joined from all rows, which a "
                "stream never has; leave out data.streaming"
            )
        while part := list(islice(joined, BLOCK_ROWS)):
            yield from maker.records(part, counts)
            _check_share(counts, max_bad_fraction)

    return opened_source


def _recognised(
    source: SourceConfig, rows: Rows, counts: SourceCounts, verbatim: bool, evaluation: bool
) -> tuple[RowMaker, Iterator[tuple[RawRow | BadRow, int]]]:
    """Returns (what makes records of the rows, the rows with the number each is joined from)."""
    as_they_are = list(islice(rows, _FIRST_ROWS))
    headless = next((is_headless(row) for row in as_they_are if isinstance(row, RawRow)), False)
    first, rest = mapped(counts.path, as_they_are, rows, source.columns)
    del as_they_are
    good = [row.values for row in first if isinstance(row, RawRow)]
    if not first:
        raise ConfigError(f"data source {counts.path} holds no rows")
    if not good:
        bad = next(row for row in first if isinstance(row, BadRow))
        number = f"{'first ' if next(rest, None) else ''}{len(first)}"
        raise ConfigError(
            f"data source {counts.path}: none of its {number} rows can be read "
            f"({bad.where}: {sample(bad.reason, bad.detail)})"
        )
    known = find(source.path) if is_hub_id(source.path) else None
    shape = custom_shape(source.normaliser) if source.normaliser else known and known.as_shape()
    try:
        shape = shape or recognise(counts.path, good, source.columns)
    except ConfigError as error:
        hint = f"; {HEADLESS}: then write one above it" if headless else ""
        raise ConfigError(f"{error}{hint}") from None
    partly_used = {theirs.partition(".")[0] for theirs in source.columns.values()}
    counts.shape = shape.name
    counts.unused = [name for name in shape.unused if name not in partly_used]
    if headless:
        counts.remarks.append(HEADLESS)
        log.warning("%s: %s; without one its first row is lost", counts.path, HEADLESS)
    maker = RowMaker(shape, Path(counts.path).name, verbatim)
    if known is not None and source.split is None:
        maker = replace(
            maker,
            split=known.row_splits and known.row_splits[evaluation],
            held_out_only=evaluation and known.evaluates_on_a_share,
        )
    return maker, _joined(shape, chain(_drained(first), rest))


def _joined(shape: Shape, rows: Iterator[RawRow | BadRow]) -> Iterator[tuple[RawRow | BadRow, int]]:
    """Yields (row, number of rows that it was made of); only joining holds all of them."""
    return shape.join(rows) if shape.join else ((row, 1) for row in rows)


def _drained(rows: list[RawRow | BadRow]) -> Iterator[RawRow | BadRow]:
    """Yields the rows, and keeps none that was taken."""
    rows.reverse()
    while rows:
        yield rows.pop()


def _check_share(counts: SourceCounts, limit: float | None) -> None:
    why = "" if limit is None else refusal(counts, limit)
    if why:
        raise ConfigError(why)


def refusal(counts: SourceCounts, limit: float) -> str:
    """Returns why a run refuses a source that can be read, or an empty text.

    That is: it has too many bad rows, or its normaliser left all out.

    Args:
        counts: of the source.
        limit: largest share of bad rows.
    """
    if counts.read == counts.unusable[LEFT_OUT] > 0:
        return (
            f"data source {counts.path}: its normaliser left out all of {counts.read} rows; it "
            "returns None for them"
        )
    return _too_many_bad(counts, limit) if counts.has_too_many_bad(limit) else ""


def _too_many_bad(counts: SourceCounts, limit: float) -> str:
    reasons = counts.bad.most_common()
    bad = counts.bad.total()
    mostly = "; ".join(
        f"{reason} ({number}: {', '.join(counts.samples[reason])})"
        for reason, number in reasons[:_REASONS_SHOWN]
    )
    more = f"; {len(reasons) - _REASONS_SHOWN} more reasons" if reasons[_REASONS_SHOWN:] else ""
    where = "normaliser" if reasons[0][0].startswith(FAILED) else "rows"
    # No share helps where all are bad.
    share = f", or raise data.max_bad_fraction ({limit:g})" if bad < counts.read else ""
    return (
        f"data source {counts.path} (read as {counts.shape}): {bad} of {counts.read} rows are "
        f"unusable, mostly {mostly}{more}; fix the {where} (rlhf data stats shows them){share}"
    )
