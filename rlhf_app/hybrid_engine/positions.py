"""How far a model's positions reach, and from where they depend on the batch."""

from __future__ import annotations

from typing import Any

# RoPE whose table depends on the longest row of the batch: cached keys would turn stale.
_BATCH_DEPENDENT = frozenset({"dynamic", "longrope"})


def most_positions(config: Any) -> int | None:
    """Most tokens of a row, or None where there is no limit.

    Args:
        config: of the text model; GPT-2's `n_positions` and the like are found under the
            common name that transformers maps to them, MPT's is not.
    """
    if any(kind == "dynamic" for kind, _ in _ropes(config)):
        return None  # its table grows with the row
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return int(limit) if limit and limit > 0 else None  # XLNet says -1


def batch_dependent_from(config: Any) -> int | None:
    """Longest row whose positions mean the same in every batch; None: any row.

    Args:
        config: of the text model.
    """
    limits = [
        original or config.max_position_embeddings
        for kind, original in _ropes(config)
        if kind in _BATCH_DEPENDENT
    ]
    return min(limits, default=None)


def _ropes(config: Any) -> list[tuple[str | None, int | None]]:
    """Type and original length of every RoPE; families with two have one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return [
        (one.get("rope_type"), one.get("original_max_position_embeddings"))
        for one in nested or [rope]
    ]
