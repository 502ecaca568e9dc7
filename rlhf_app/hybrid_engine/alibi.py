"""ALiBi: a bias that grows with the key's position, one slope per head (Press et al. 2022).

Shapes: H query heads, L positions.

The bias of a query at i for a key at j is slope * (j - i); softmax does not see the part that
depends on i alone, so slope * j does, and needs no position of the query.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Alibi:
    """The bias exactly as the model's own forward rounds it, tabulated.

    Rounding matters: in bfloat16, products near 800 are multiples of 4, and a policy sampled
    without that rounding is not the one that is trained.

    Args:
        make: from a length L to [H, L] biases, in any dtype.
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._tables: dict[int, torch.Tensor] = {}

    def table(self, positions: int) -> torch.Tensor:
        """Biases of the first `positions` keys.

        Args:
            positions: how many.

        Returns:
            [H, positions] fp32, unit stride along the positions. The same positions are at
            the same address for as long as this object lives, as captured graphs need.
        """
        # Powers of two: tables of all sizes together take at most twice the largest.
        size = 1 << max(positions - 1, 15).bit_length()
        table = self._tables.get(size)
        if table is None:
            # A later training forward may use it: it must not be an inference tensor.
            with torch.inference_mode(False), torch.no_grad():
                table = self._make(size).float().contiguous()
            self._tables[size] = table
        return table[:, :positions]
