"""Whether each stage of a run has something to train and to evaluate on, before the first starts.

A stage finds that out for itself, but the third one after hours of the first two.
"""

from __future__ import annotations

from collections.abc import Sequence

from data_sources.reading_once import ReadOnce
from data_sources.source_identity import is_small_file
from data_sources.source_readers import own_sources, reader_of_first_rows
from data_sources.sources import is_hub_id, read_source
from data_sources.stage_data import load_stage_data, load_text
from rlhf_app.config.schema import RunConfig, SourceConfig, StageName
from rlhf_app.data_paths import is_url
from rlhf_app.errors import ConfigError

#: Of sources that are not small files here, no more is read: the stages read them.
FIRST_ROWS = 10_000


def check_stage_data(
    config: RunConfig, stages: Sequence[StageName]
) -> dict[StageName, tuple[int, int]]:
    """Splits the data over the stages as they will do, from the first rows of large sources.

    Only where these rows give a stage nothing, all are read, into the cache where that is possible.

    Args:
        config: the whole run.
        stages: those that are going to run.

    Returns:
        stage -> (records to train on, records to evaluate on) among the rows that were read.

    Raises:
        ConfigError: what the stage would say.
    """
    data = config.data
    first = data.look_ahead if data.streaming else FIRST_ROWS
    read = ReadOnce(reader_of_first_rows(config, first, small_whole=not data.streaming))
    found: dict[StageName, tuple[int, int]] = {}
    for stage in stages:
        try:
            rows = load_stage_data(config, stage, read)
        except ConfigError:
            rows = load_stage_data(config, stage)
        found[stage] = (len(rows.train), len(rows.evaluation))
    if "ppo" in stages and config.ppo.ptx_coef:
        try:
            load_text(config, read)
        except ConfigError:
            load_text(config)
    return found


def is_all_small(config: RunConfig, stages: Sequence[StageName]) -> bool:
    """Returns whether all that these stages read are small files here.

    Raises:
        ConfigError: one of them is not there.
    """
    data = config.data
    used = [source for stage in stages for source in own_sources(config, stage) or data.sources]
    text = config.ppo.ptx_data if "ppo" in stages and config.ppo.ptx_coef else ()
    return not data.streaming and all(map(_is_small, (*used, *data.eval, *text)))


def _is_small(source: SourceConfig) -> bool:
    if is_url(source.path) or is_hub_id(source.path):
        return False
    return is_small_file(read_source(source.path, source.split))
