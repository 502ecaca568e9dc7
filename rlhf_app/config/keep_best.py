"""What `keep_best` needs, in every stage."""

from __future__ import annotations


def check_keep_best(metric: str | None, eval_every: int, unit: str) -> None:
    """Refuse to choose the best of one evaluation.

    Args:
        metric: the stage's `keep_best`.
        eval_every: the stage's `eval_every`.
        unit: what it counts.

    Raises:
        ValueError: there are no evaluations to choose from.
    """
    if metric is not None and eval_every == 0:
        raise ValueError(
            f"keep_best {metric} chooses among evaluations and there is one alone: set eval_every "
            f"to the {unit} between them, or leave keep_best unset"
        )
