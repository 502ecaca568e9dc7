"""Records to the examples of a stage, wherever these are kept."""

from __future__ import annotations

from collections.abc import Sequence

from data_sources.encoded import Examples, ListedExamples
from data_sources.encodings import E, Encoding
from data_sources.published import cache_root
from data_sources.record_stream import RecordStream
from data_sources.records import Record
from data_sources.stored_examples import stored_examples
from data_sources.streamed_examples import StreamedExamples
from rlhf_app.config.data import DataConfig
from rlhf_app.cores import own_cores

#: Fewer records are encoded anew by every process: that takes seconds, and no disk.
SMALL_ROWS = 20_000


def encode(
    records: Sequence[Record] | RecordStream, encoding: Encoding[E], data: DataConfig
) -> Examples[E]:
    """Encodes the records of a stage.

    Args:
        records: of the stage, in any number of repeats.
        encoding: of the stage.
        data: where the encoded rows are kept, and how many processes make them.

    Raises:
        ConfigError: the chat format cannot tell what the encoding asks for, or the cache cannot be
            written to.
    """
    encoding.check()
    if isinstance(records, RecordStream):
        return StreamedExamples(records, encoding)
    if len(records) < SMALL_ROWS:
        return ListedExamples.of(records, encoding)
    workers = data.workers or own_cores()
    return stored_examples(records, encoding, cache_root(data.cache_dir), workers)
