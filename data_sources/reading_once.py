"""Sources that several stages share are read once where all stages are looked at together."""

from __future__ import annotations

from collections.abc import Callable

from data_sources.counts import SourceCounts
from data_sources.record_table import RecordTable
from data_sources.stage_data import Reader
from rlhf_app.config.schema import SourceConfig

Loaded = tuple[RecordTable, SourceCounts]


class ReadOnce:
    """A reader that remembers what it has read.

    Args:
        read: reads a source.
        on_read: called with (records, counts, evaluation) of each source that is read.

    """

    def __init__(
        self,
        read: Reader,
        on_read: Callable[[RecordTable, SourceCounts, bool], None] = lambda *_: None,
    ) -> None:
        self._read = read
        self._on_read = on_read
        self._by_key: dict[tuple[str, bool], Loaded] = {}

    @property
    def loaded(self) -> list[Loaded]:
        """What was read, in that order."""
        return list(self._by_key.values())

    def __call__(self, source: SourceConfig, evaluation: bool) -> Loaded:
        """Returns the source's records and counts; its weight does not matter."""
        key = (source.model_dump_json(exclude={"weight"}), evaluation)
        if key not in self._by_key:
            records, counts = self._by_key[key] = self._read(source, evaluation)
            self._on_read(records, counts, evaluation)
        return self._by_key[key]
