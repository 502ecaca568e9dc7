"""Where a source's rows are: a file, a directory, or a dataset on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_sources.raw_rows import RawRow, Rows
from data_sources.readers import is_data_file, read_file
from rlhf_app.errors import ConfigError

# A split's usual names; the first that exists is taken.
TRAIN_SPLITS = ("train", "train_prefs", "train_sft")
EVALUATION_SPLITS = ("test", "validation", "eval", "dev", "test_prefs", "test_sft")
_HUB_ID = re.compile(r"^[\w.-]+(?:/[\w.-]+)?(?::[\w.-]+)?$")


def read_source(path: str, split: str | None = None, *, evaluation: bool = False) -> Rows:
    """Yields the rows of a source.

    Args:
        path: file, directory of files, `save_to_disk` directory, or Hub id (`id:config`).
        split: split to take; None is the train split, or the test split for `evaluation`.
        evaluation: the rows are for evaluation.

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
    if path.startswith(("/", ".", "~")) or not _HUB_ID.match(path) or is_data_file(place):
        raise ConfigError(f"data source {path} does not exist; check the path and the cwd")
    return _hub(path, split, wanted)


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
    return _dataset_rows(path, loaded, wanted)


def _hub(path: str, split: str | None, wanted: Sequence[str]) -> Rows:
    import datasets

    name, _, config = path.partition(":")
    try:
        loaded = datasets.load_dataset(name, config or None)
    except Exception as error:
        raise ConfigError(_why_not(path, error)) from error
    return _dataset_rows(path, loaded, wanted if split is None else (split,))


def _why_not(path: str, error: Exception) -> str:
    """One line: no network, no such dataset, or what `datasets` says."""
    names, cause = set(), error.__cause__ or error.__context__
    names.add(type(error).__name__)
    while cause is not None:
        names.add(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    first = (str(error).strip().splitlines() or [""])[0]
    if names & {"ConnectionError", "ConnectError", "OfflineModeIsEnabled", "ReadTimeout"} or (
        "reach the hugging face hub" in str(error).lower()
    ):
        return (
            f"data source {path}: no such file or directory here, and the Hugging Face Hub "
            "cannot be reached; give a local file, or check the network and HF_HUB_OFFLINE"
        )
    if "DatasetNotFoundError" in names:
        return f"data source {path} is neither a file or directory here nor a dataset on the Hub"
    return f"data source {path} cannot be loaded ({type(error).__name__}: {first})"


def _dataset_rows(path: str, loaded: Any, wanted: Sequence[str]) -> Rows:
    if hasattr(loaded, "keys"):  # a DatasetDict, not a Dataset
        found = list(loaded.keys())
        split = next((name for name in wanted if name in found), None)
        if split is None and len(found) == 1 and wanted == TRAIN_SPLITS:
            split = found[0]
        if split is None:
            raise ConfigError(
                f"data source {path} has splits {', '.join(found)}, not {wanted[0]}; "
                "set the source's split"
            )
        loaded = loaded[split]
    return _numbered(path, loaded)


def _numbered(path: str, loaded: Any) -> Iterator[RawRow]:
    for number, values in enumerate(loaded, 1):
        yield RawRow(f"{path} row {number}", dict(values))
