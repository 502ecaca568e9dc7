"""What a model can take: lengths and ids, checked before any training."""

from __future__ import annotations

from typing import Any

from rlhf_app.errors import ConfigError

# DeepSpeed-Chat's limit too, and enough for its data.
DEFAULT_LENGTH = 512


def length_limit(wanted: int | None, positions: int, path: str) -> int:
    """Tokens of prompt and answer that a stage keeps.

    Args:
        wanted: `data.max_length`; None: the smaller of 512 and the model's positions.
        positions: that the model has.
        path: of the model, for the error.

    Raises:
        ConfigError: the setting exceeds the model's positions.
    """
    if wanted is None:
        return min(DEFAULT_LENGTH, positions)
    if wanted > positions:
        raise ConfigError(
            f"data.max_length {wanted} exceeds the {positions} positions of {path}: lower it"
        )
    return wanted


def check_vocabulary(model: Any, highest_id: int, path: str) -> None:
    """Refuses ids beyond the embedding; on a GPU they would be an illegal memory access.

    Args:
        model: a Hugging Face model.
        highest_id: of any token of the data.
        path: of the model, for the error.

    Raises:
        ConfigError: the tokenizer has more ids than the model has embeddings.
    """
    embeddings = model.get_input_embeddings().num_embeddings
    if highest_id >= embeddings:
        raise ConfigError(
            f"{path}: token id {highest_id} but only {embeddings} embeddings: "
            "the tokenizer in this directory belongs to another model"
        )
