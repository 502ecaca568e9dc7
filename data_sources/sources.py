"""Where a source's rows are: files here or elsewhere, directories, or datasets of the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from data_sources.hub import EVALUATION_SPLITS, TRAIN_SPLITS, Hub, dataset_rows, hub_rows
from data_sources.raw_rows import BadRow, RawRow, Rows
from data_sources.readers import is_data_file, read_file
from data_sources.remote import RemoteFile, remote_files
from rlhf_app.data_paths import fixed_part, has_wildcards, is_url, matching_files, no_weight
from rlhf_app.errors import ConfigError
from rlhf_app.home import expanded
from rlhf_app.url_secrets import without_secrets

_HUB_ID = re.compile(r"^[\w.-]+(?:/[\w.-]+)?(?::[\w.-]+)?$")


def read_source(
    path: str, split: str | None = None, *, evaluation: bool = False, hub: Hub | None = None
) -> Rows:
    """Yields the rows of a source.

    Args:
        path: file, pattern (data/*.jsonl), directory of files, `save_to_disk` directory, address
            of any of these (s3://...), or Hub id (`id:config`).
        split: split to take; None is the train split, or the test split for `evaluation`.
        evaluation: the rows are for evaluation.
        hub: where datasets are loaded from; None is the Hugging Face Hub.

    Raises:
        ConfigError: nothing there, nothing readable in it, no such split, or no network.
    """
    if not path.strip():
        raise ConfigError("a data source has an empty path; name a file, directory or Hub dataset")
    wanted = (split,) if split else (EVALUATION_SPLITS if evaluation else TRAIN_SPLITS)
    if is_url(path):
        return _remote(path, split, wanted)
    place = expanded(path)
    if place.is_file():
        if split:
            raise ConfigError(f"{path} is one file and has no split {split!r}; drop the split")
        return FileRows([place])
    if place.is_dir():
        saved = {"dataset_dict.json", "state.json"} & {p.name for p in place.iterdir()}
        return _saved(path, wanted) if saved else _directory(place, split, wanted)
    if has_wildcards(path):
        base = fixed_part(path)
        matching = {file.relative_to(base): file for file in matching_files(path)}
        return FileRows(_of_split(f"pattern {path}", matching, split, wanted, all_of_one=True))
    if not is_hub_id(path):
        raise ConfigError(
            f"data source {path} does not exist{no_weight(path)}; check the path and the cwd"
        )
    return hub_rows(path, split, evaluation=evaluation, hub=hub)


def is_hub_id(path: str) -> bool:
    """Returns whether a source is a dataset of the Hub: nothing here, and no path by its form."""
    place = expanded(path)
    is_path = path.startswith(("/", ".", "~")) or is_data_file(place) or place.exists()
    return not is_path and _HUB_ID.match(path) is not None


def _directory(place: Path, split: str | None, wanted: Sequence[str]) -> Rows:
    found = {path.relative_to(place): path for path in sorted(place.rglob("*")) if path.is_file()}
    return FileRows(_of_split(f"directory {place}", found, split, wanted))


def _remote(url: str, split: str | None, wanted: Sequence[str]) -> Rows:
    found = remote_files(url)
    shown = without_secrets(url)
    if found.is_saved:
        return _saved(url, wanted)
    if found.is_file:
        if split:
            raise ConfigError(f"{shown} is one file and has no split {split!r}; drop the split")
        return FileRows(list(found.files.values()))
    return FileRows(_of_split(shown, found.files, split, wanted, all_of_one="*" in url))


def _of_split(
    shown: str,
    files: Mapping[Any, Path | RemoteFile],
    split: str | None,
    wanted: Sequence[str],
    *,
    all_of_one: bool = False,
) -> list[Path | RemoteFile]:
    """Returns the data files that are named after the split, or all where none is.

    Args:
        shown: what holds them, for messages.
        files: path below the directory -> file.
        split: the split that was asked for, or None.
        wanted: names that the split may have.
        all_of_one: files that all belong to one split were chosen by the user: any will do.
    """
    files = {
        path: file
        for path, file in files.items()
        if is_data_file(file) and not file.name.startswith(("dataset_info", "."))
    }
    if not files:
        raise ConfigError(
            f"data {shown} holds no .json, .jsonl, .ndjson, .csv, .tsv, .parquet or .arrow file, "
            "plain, .gz or .zst"
        )
    named = {path: _split_in_name(path) for path in files}
    found = sorted({name for name in named.values() if name})
    if not found:
        if split:
            raise ConfigError(f"data {shown} has no file named after split {split!r}")
        return list(files.values())
    if split is None and all_of_one and len(set(named.values())) == 1:
        return list(files.values())
    name = next((name for name in wanted if name in found), None)
    if name is None:
        raise ConfigError(
            f"data {shown} has splits {', '.join(found)}, not {wanted[0]}; set the source's split"
        )
    return [file for path, file in files.items() if named[path] == name]


def _split_in_name(path: PurePath) -> str | None:
    """Returns the split that a file's name or folder starts with, as in train-00000-of-2."""
    for part in reversed(path.parts):
        words = re.split(r"[-_.]", part.lower())
        for name in (*TRAIN_SPLITS, *EVALUATION_SPLITS):
            if words[: len(name.split("_"))] == name.split("_"):
                return name
    return None


class FileRows(Iterator[RawRow | BadRow]):
    """The rows of files one after another.

    Args:
        files: are opened when their rows are asked for.
    """

    def __init__(self, files: Sequence[Path | RemoteFile]) -> None:
        self.files = tuple(files)
        self._rows = chain.from_iterable(map(read_file, files))

    def __next__(self) -> RawRow | BadRow:
        return next(self._rows)


def _saved(path: str, wanted: Sequence[str]) -> Rows:
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        shown = without_secrets(path)
        raise ConfigError(
            f"saved dataset {shown} cannot be read: copy it again, or save it again with "
            f"save_to_disk ({first})"
        ) from error
    return dataset_rows(path, loaded, wanted)
