"""Sources that several stages share are read once where all stages are looked at together."""

from __future__ import annotations

from collections.abc import Callable

from data_sources.counts import SourceCounts
from data_sources.load import refusal
from data_sources.record_table import RecordTable
from data_sources.source_readers import Reader, used_sources
from rlhf_app.config.schema import RunConfig, SourceConfig
from rlhf_app.errors import ConfigError

Loaded = tuple[RecordTable, SourceCounts]


class ReadOnce:
    """A reader that remembers what it has read, and what could not be read.

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
        self._failed: dict[tuple[str, bool], ConfigError] = {}

    @property
    def loaded(self) -> list[Loaded]:
        """What was read, in that order."""
        return list(self._by_key.values())

    def __call__(self, source: SourceConfig, evaluation: bool) -> Loaded:
        """Returns the source's records and counts; its weight does not matter.

        Raises:
            ConfigError: it cannot be read, now or before.
        """
        key = (source.model_dump_json(exclude={"weight"}), evaluation)
        if key in self._failed:
            raise self._failed[key]
        if key not in self._by_key:
            try:
                records, counts = self._read(source, evaluation)
            except ConfigError as error:
                self._failed[key] = error
                raise
            self._by_key[key] = records, counts
            self._on_read(records, counts, evaluation)
        return self._by_key[key]

    def read_all(self, config: RunConfig) -> None:
        """Reads every source of a run; those that cannot be read are remembered."""
        for source, evaluation in used_sources(config):
            try:
                self(source, evaluation)
            except ConfigError:
                continue

    def refusals(self, limit: float) -> list[str]:
        """Returns why a run would refuse sources, each once.

        Args:
            limit: data.max_bad_fraction.
        """
        read = (refusal(counts, limit) for _, counts in self.loaded)
        every = [*map(str, self._failed.values()), *filter(None, read)]
        return list(dict.fromkeys(every))
