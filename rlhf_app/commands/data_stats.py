"""`rlhf data stats`: the data of a run in numbers, before anything is trained on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rlhf_app.commands import data_options as options


def stats(
    data: options.Data = None,
    sft_data: options.SftData = None,
    reward_data: options.RewardData = None,
    ppo_data: options.PpoData = None,
    eval_data: options.EvalData = None,
    model: options.Model = None,
    data_split: options.DataSplit = None,
    chat_format: options.ChatFormatName = None,
    max_length: options.MaxLength = None,
    config_file: options.ConfigFile = None,
    set_values: options.SetValues = None,
    debug: options.Debug = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with plots, in one file.")
    ] = None,
) -> None:
    """Count rows, lengths, duplicates and scripts, and compare chosen with rejected answers."""
    del debug  # for who prints errors
    from rich.console import Console

    from data_sources.source_readers import reader_of
    from data_sources.stats.collect import collect
    from rlhf_app.errors import ConfigError
    from rlhf_app.report.data_stats_page import page
    from rlhf_app.report.data_stats_tables import print_stats

    if html is not None:
        _check_page(html)
    config = options.data_config(
        config_file,
        set_values,
        data=data,
        sft_data=sft_data,
        reward_data=reward_data,
        ppo_data=ppo_data,
        eval_data=eval_data,
        actor_model=model,
        data_split=data_split,
        chat_format=chat_format,
        max_length=max_length,
    )
    name = config.model.actor
    views = options.stage_views(config, name) if name else {}
    # Everything that can be read is counted; a run refuses sources with many bad rows.
    read = reader_of(config, to_look=True)
    limit = config.data.max_bad_fraction
    result = collect(config, read, views, model=name or "", max_bad_fraction=limit)
    if html is not None:
        _write_page(html, page(result))
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        print_stats(Console(highlight=False), result)
        if html is not None:
            print(f"page: {html}")
    if result.problem:
        raise ConfigError(result.problem)


def _check_page(path: Path) -> None:
    from rlhf_app.errors import ConfigError

    if path.is_dir():
        raise ConfigError(f"--html {path}: is a directory; name a file")
    if path.exists() and path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--html {path}: exists and is no page; name a file that ends in .html")
    if not path.parent.is_dir():
        raise ConfigError(f"--html {path}: no directory {path.parent}")


def _write_page(path: Path, text: str) -> None:
    from rlhf_app.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written: {error.strerror}") from None
