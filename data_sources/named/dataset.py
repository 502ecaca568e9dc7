"""What the registry knows of one dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from data_sources.shapes import Join, Normaliser, Shape


@dataclass(frozen=True, slots=True)
class NamedDataset:
    """A dataset that is known by its Hub id.

    Attributes:
        hub_id: where it is loaded from.
        normalise: raw row to records; None where the columns tell what the rows are.
        columns: part -> column, for a `normalise` that is shared by several datasets.
        shape: name of the shape that is shown, with `normalise`.
        join: joins rows that belong together before they are normalised.
        train: the split to train on.
        evaluation: the split to evaluate on, and what else it may be called; empty: a tenth of
            the train split's prompts.
        row_splits: where a column "split" divides one split: its values for train and evaluation.
        config: the config that is loaded.
        config_is_folder: `id:NAME` names a folder of the repository, not a config.
        data_files: the file to load where the repository holds others too.
    """

    hub_id: str
    normalise: Normaliser | None = None
    columns: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    shape: str = ""
    join: Join | None = None
    train: str = "train"
    evaluation: tuple[str, ...] = ()
    row_splits: tuple[str, str] | None = None
    config: str | None = None
    config_is_folder: bool = False
    data_files: str | None = None

    def as_shape(self) -> Shape | None:
        """Returns the shape of its rows, or None where it is recognised by the columns."""
        if self.normalise is None:
            return None
        return Shape(self.shape, self.normalise, self.columns, self.join)

    @property
    def evaluates_on_a_share(self) -> bool:
        """Whether nothing in the data says which rows are for evaluation."""
        return not self.evaluation and self.row_splits is None
