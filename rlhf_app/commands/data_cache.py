"""`rlhf data cache`: the records and tokens that are kept of large data, and their removal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from data_sources.cache_stores import Store


def cache(
    remove: Annotated[
        bool, typer.Option("--clear", help="Remove what no running process uses.")
    ] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than", metavar="DAYS", help="With --clear: only what was not used for as long."
        ),
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", help="The run's data.cache_dir, if it sets one.")
    ] = None,
) -> None:
    """List what is kept of large data: what it was made of, its size and its last use."""
    from data_sources.cache_stores import clear, stores
    from data_sources.published import cache_root
    from rlhf_app.errors import ConfigError
    from rlhf_app.report.visible import one_line, visible

    if older_than is not None and not remove:
        raise ConfigError("--older-than: says what --clear removes; give both")
    if older_than is not None and not older_than >= 0:
        raise ConfigError(f"--older-than {older_than:g}: give a number of days, 0 or more")
    root = cache_root(None if cache_dir is None else str(cache_dir))
    if root.exists() and not root.is_dir():
        raise ConfigError(f"data.cache_dir: {root} is a file; name a directory")
    shown = visible(str(root))
    if not remove:
        found = stores(root)
        if found:
            _print(root, found)
        print(f"{shown}: {len(found)} stores, {_size(sum(store.size for store in found))}")
        return
    result = clear(root, older_than)
    for folder, why in result.kept:
        print(f"kept: {visible(str(folder.relative_to(root)))} ({one_line(why)})")
    total = _size(sum(store.size for store in result.removed))
    print(f"{shown}: removed {len(result.removed)} stores, {total}")


def _print(root: Path, found: list[Store]) -> None:
    from datetime import datetime

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rlhf_app.report.visible import one_line, visible

    table = Table("directory", "kind", "made of", title="Cache of large data")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("last used")
    for column in table.columns:
        column.overflow = "fold"
    for store in found:
        used = datetime.fromtimestamp(store.used).strftime("%Y-%m-%d %H:%M")
        table.add_row(
            Text(visible(str(store.folder.relative_to(root)))),
            Text(store.kind),
            Text(one_line(store.about, 300)),
            _size(store.size),
            "in use" if store.in_use else used,
        )
    Console(highlight=False).print(table)


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
