"""Datasets of the Hugging Face Hub: which part of them is read, and how they are reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from data_sources.named import find
from data_sources.raw_rows import RawRow, Rows
from rlhf_app.errors import ConfigError
from rlhf_app.models.hub_reach import use_cache_if_unreachable

# A split's usual names; the first that exists is taken.
TRAIN_SPLITS = ("train", "train_prefs", "train_sft")
EVALUATION_SPLITS = ("test", "validation", "eval", "dev", "test_prefs", "test_sft")
# The branch on which the Hub keeps every public dataset as Parquet, one folder per config.
_EXPORTED = "refs/convert/parquet"


class Hub(Protocol):
    """What datasets are loaded through; tests stand a local directory in for it."""

    def load(self, name: str, config: str | None, **options: str) -> Any:
        """Returns `datasets.load_dataset(name, config, **options)`."""

    def exported_configs(self, name: str) -> list[str]:
        """Returns the configs that the Hub exports as Parquet."""


class HuggingFaceHub:
    """The Hub itself.

    Args:
        streaming: rows are fetched as they are read, and none is kept.
    """

    def __init__(self, *, streaming: bool = False) -> None:
        self._streaming = streaming

    def load(self, name: str, config: str | None, **options: str) -> Any:
        """Returns all splits of a dataset."""
        import datasets

        use_cache_if_unreachable()
        how: dict[str, Any] = {"streaming": True} if self._streaming else {}
        return datasets.load_dataset(name, config, **options, **how)

    def exported_configs(self, name: str) -> list[str]:
        """Returns the folders of the Parquet branch."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFolder

        use_cache_if_unreachable()
        found = HfApi().list_repo_tree(name, repo_type="dataset", revision=_EXPORTED)
        return sorted(item.path for item in found if isinstance(item, RepoFolder))


def hub_rows(path: str, split: str | None, *, evaluation: bool, hub: Hub | None = None) -> Rows:
    """Yields the rows of one split of `id` or `id:config`.

    Args:
        path: the dataset; known ones (`data_sources.named`) say what else it takes.
        split: split to take; None is the train split, or the test split for `evaluation`.
        evaluation: the rows are for evaluation.
        hub: where it is loaded from; None is the Hugging Face Hub.

    Raises:
        ConfigError: no such dataset, config or split, or no network.
    """
    dataset = find(path)
    name, _, config = path.partition(":")
    options: dict[str, str] = {}
    wanted: Sequence[str] = EVALUATION_SPLITS if evaluation else TRAIN_SPLITS
    if dataset is not None:
        name = dataset.hub_id
        if dataset.config_is_folder and config:
            options["data_dir"], config = config, ""
        elif dataset.config is not None:
            config = dataset.config
        if dataset.data_files is not None:
            options["data_files"] = dataset.data_files
        # Without a split of its own, the evaluation takes a share of the train split's prompts.
        wanted = (evaluation and dataset.evaluation) or (dataset.train,)
    try:
        loaded = _loaded(hub or HuggingFaceHub(), name, config or None, options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_why_not(path, error)) from error
    return dataset_rows(path, loaded, wanted if split is None else (split,))


def _loaded(hub: Hub, name: str, config: str | None, options: dict[str, str]) -> Any:
    try:
        return hub.load(name, config, **options)
    except RuntimeError as error:
        # Older datasets are Python scripts, which `datasets` runs no more; their rows are on the
        # Parquet branch.
        if "scripts are no longer supported" not in str(error):
            raise
    if "data_dir" in options:
        return hub.load(name, None, revision=_EXPORTED, **options)
    configs = hub.exported_configs(name)
    if config is None and len(configs) == 1:
        (config,) = configs
    if config not in configs:
        known = ", ".join(configs) or "none"
        raise ConfigError(
            f"data source {name}: has the configs {known}; name one as {name}:"
            f"{configs[0] if configs else 'CONFIG'}"
        )
    return hub.load(name, None, revision=_EXPORTED, data_dir=config, **options)


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


def dataset_rows(path: str, loaded: Any, wanted: Sequence[str]) -> Rows:
    """Yields the rows of a Dataset, or of the first wanted split of a DatasetDict.

    Raises:
        ConfigError: it has none of the wanted splits.
    """
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
    return DatasetRows(path, loaded)


class DatasetRows(Iterator[RawRow]):
    """The rows of a dataset of the `datasets` library.

    Args:
        path: the source, for messages.
        dataset: one split.
    """

    def __init__(self, path: str, dataset: Any) -> None:
        self.dataset = dataset
        self._rows = (
            RawRow(f"{path} row {number}", dict(values)) for number, values in enumerate(dataset, 1)
        )

    def __next__(self) -> RawRow:
        return next(self._rows)
