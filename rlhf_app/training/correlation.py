"""Pearson's correlation from sums, which add up over micro-batches and ranks."""

from __future__ import annotations

import math

# Below this share of the mean square a variance is the rounding of fp32 numbers.
_LEAST_VARIANCE = 1e-12


def correlation(
    count: float, x: float, y: float, x_squares: float, y_squares: float, products: float
) -> float:
    """Cov(x, y) / (std(x) std(y)).

    Args:
        count: number of pairs (x, y).
        x: sum of x.
        y: sum of y.
        x_squares: sum of x^2.
        y_squares: sum of y^2.
        products: sum of x y.

    Returns:
        A number in [-1, 1]; NaN where x or y is the same everywhere, as it is then undefined.
    """
    if count < 2:
        return math.nan
    mean_x, mean_y = x / count, y / count
    variance_x = x_squares / count - mean_x**2
    variance_y = y_squares / count - mean_y**2
    if (
        variance_x <= _LEAST_VARIANCE * x_squares / count
        or variance_y <= _LEAST_VARIANCE * y_squares / count
    ):
        return math.nan
    covariance = products / count - mean_x * mean_y
    return max(-1.0, min(1.0, covariance / math.sqrt(variance_x * variance_y)))
