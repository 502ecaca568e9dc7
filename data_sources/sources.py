"""Where a source's rows are: a file, a directory, or a dataset on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from data_sources.hub import EVALUATION_SPLITS, TRAIN_SPLITS, Hub, dataset_rows, hub_rows
from data_sources.raw_rows import Rows
from data_sources.readers import is_data_file, read_file
from rlhf_app.errors import ConfigError

_HUB_ID = re.compile(r"^[\w.-]+(?:/[\w.-]+)?(?::[\w.-]+)?$")


def read_source(
    path: str, split: str | None = None, *, evaluation: bool = False, hub: Hub | None = None
) -> Rows:
    """Yields the rows of a source.

    Args:
        path: file, directory of files, `save_to_disk` directory, or Hub id (`id:config`).
        split: split to take; None is the train split, or the test split for `evaluation`.
        evaluation: the rows are for evaluation.
        hub: where datasets are loaded from; None is the Hugging Face Hub.

    Raises:
        ConfigError: nothing there, nothing readable in it, no such split, or no network.
    """
    if not path.strip():
        raise ConfigError("a data source has an empty path; name a file, directory or Hub dataset")
    place = Path(path).expanduser()
    wanted = (split,) if split else (EVALUATION_SPLITS if evaluation else TRAIN_SPLITS)
    if place.is_file():
        if split:
            raise ConfigError(f"{path} is one file and has no split {split!r}; drop the split")
        return read_file(place)
    if place.is_dir():
        saved = {"dataset_dict.json", "state.json"} & {p.name for p in place.iterdir()}
        return _saved(path, wanted) if saved else _directory(place, split, wanted)
    if not is_hub_id(path):
        raise ConfigError(f"data source {path} does not exist; check the path and the cwd")
    return hub_rows(path, split, evaluation=evaluation, hub=hub)


def is_hub_id(path: str) -> bool:
    """Returns whether a source is a dataset of the Hub: nothing here, and no path by its form."""
    place = Path(path).expanduser()
    is_path = path.startswith(("/", ".", "~")) or is_data_file(place) or place.exists()
    return not is_path and _HUB_ID.match(path) is not None


def _directory(place: Path, split: str | None, wanted: Sequence[str]) -> Rows:
    """Reads the data files of a directory: those named after the split, or all if none is."""
    files = sorted(p for p in place.rglob("*") if p.is_file() and is_data_file(p))
    files = [p for p in files if not p.name.startswith(("dataset_info", "."))]
    if not files:
        raise ConfigError(
            f"data directory {place} holds no .json, .jsonl, .csv, .tsv, .parquet or .arrow file"
        )
    named = {p: _split_in_name(p.relative_to(place)) for p in files}
    if any(named.values()):
        found = sorted({name for name in named.values() if name})
        name = next((name for name in wanted if name in found), None)
        if name is None:
            raise ConfigError(
                f"data directory {place} has splits {', '.join(found)}, not {wanted[0]}; "
                "set the source's split"
            )
        files = [p for p in files if named[p] == name]
    elif split:
        raise ConfigError(f"data directory {place} has no file named after split {split!r}")
    return _files(files)


def _split_in_name(path: Path) -> str | None:
    """Returns the split that a file's name or folder starts with, as in train-00000-of-2."""
    for part in reversed(path.parts):
        words = re.split(r"[-_.]", part.lower())
        for name in (*TRAIN_SPLITS, *EVALUATION_SPLITS):
            if words[: len(name.split("_"))] == name.split("_"):
                return name
    return None


def _files(files: Sequence[Path]) -> Rows:
    for path in files:
        yield from read_file(path)


def _saved(path: str, wanted: Sequence[str]) -> Rows:
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"saved dataset {path} cannot be read: {first}") from error
    return dataset_rows(path, loaded, wanted)
