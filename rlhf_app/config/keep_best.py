"""What `keep_best` needs, in every stage."""

from __future__ import annotations


def check_keep_best(metric: str | None, eval_every: int, unit: str, total: int | None) -> None:
    """Refuse to choose the best of one evaluation.

    Args:
        metric: the stage's `keep_best`.
        eval_every: the stage's `eval_every`.
        unit: what it counts.
        total: how many of them the stage has at most; None where the data says.

    Raises:
        ValueError: there are no evaluations to choose from.
    """
    if metric is None:
        return
    if eval_every == 0:
        raise ValueError(
            f"keep_best {metric} chooses among evaluations and there is one alone: set eval_every "
            f"to the {unit} between them, or leave keep_best unset"
        )
    if total is not None and eval_every >= total:
        raise ValueError(
            f"keep_best {metric} chooses among evaluations and there is one alone, at the end of "
            f"{total} {unit}: set eval_every, {eval_every}, to less than that, or leave keep_best "
            "unset"
        )
