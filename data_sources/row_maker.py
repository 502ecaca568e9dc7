"""Raw rows of one source to its records; what gives none is counted by its reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from data_sources.counts import FOR_TRAINING, OTHER_SPLIT, SourceCounts
from data_sources.fields import Row, RowError
from data_sources.identity import content_uid, prompt_key
from data_sources.normalise import Normalised
from data_sources.raw_rows import BadRow, RawRow
from data_sources.records import Record
from data_sources.shapes import Shape
from data_sources.split import held_out

UNEXPECTED = "values are not of the expected kind"
# Held out of datasets that have one split, as DeepSpeed-Chat does (9:1).
_EVALUATION_SHARE = 0.1
_UNEXPECTED = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    StopIteration,
    OverflowError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class RowMaker:
    """What becomes of a row.

    Attributes:
        shape: of the source.
        source: its name in the records.
        verbatim: keep texts exactly as they are.
        split: value of the column `split` of the rows that are wanted, or None for all.
        held_out_only: keep a tenth of the prompts, those to evaluate on.
    """

    shape: Shape
    source: str
    verbatim: bool
    split: str | None = None
    held_out_only: bool = False

    def records(
        self, rows: Iterable[tuple[RawRow | BadRow, int]], counts: SourceCounts
    ) -> Iterator[Record]:
        """Yields the records of rows.

        Args:
            rows: (row, number of rows that it was joined from).
            counts: is added to.
        """
        for row, size in rows:
            counts.read += size
            if isinstance(row, RawRow) and self.split not in (None, row.values.get("split")):
                row = BadRow(row.where, OTHER_SPLIT, "")
            if isinstance(row, BadRow):
                counts.reject(row.reason, sample(row.where, row.detail), size)
                continue
            try:
                result = self._normalised(row.values)
            except RowError as error:
                counts.reject(error.reason, sample(row.where, error.detail), size)
                continue
            made = result.records
            if self.held_out_only:
                made = tuple(r for r in made if held_out(prompt_key(r.messages), _EVALUATION_SHARE))
                if not made:
                    counts.reject(FOR_TRAINING, row.where, size)
                    continue
            counts.notes.update(result.notes)
            counts.records += len(made)
            for record in made:
                yield replace(record, source=self.source, uid=content_uid(record))

    def _normalised(self, row: Row) -> Normalised:
        """Normalises one row; whatever its values trip over is a reason to count it."""
        try:
            return self.shape.normalise(row, self.shape.columns, self.verbatim)
        except RowError:
            raise
        except _UNEXPECTED as error:
            raise RowError(UNEXPECTED, f"{type(error).__name__}: {error}"[:80]) from error


def sample(where: str, detail: str) -> str:
    """Returns where a row is and what is wrong with it.

    Values are shown to the user: no half of a surrogate pair, and one line.
    """
    detail = " ".join(detail.encode("utf-8", "backslashreplace").decode("utf-8").split())
    return f"{where}: {detail}" if detail else where
