"""Records to the examples of a stage, wherever these are kept."""

from __future__ import annotations

from collections.abc import Sequence

from data_sources.encoded import Examples, ListedExamples
from data_sources.encodings import E, Encoding
from data_sources.records import Record


def encode(records: Sequence[Record], encoding: Encoding[E]) -> Examples[E]:
    """Encodes the records of a stage.

    Args:
        records: of the stage, in any number of repeats.
        encoding: of the stage.

    Raises:
        ConfigError: the chat format cannot tell what the encoding asks for.
    """
    encoding.check()
    return ListedExamples.of(records, encoding)
