"""Notices operations that read a tensor's values on the host: no CUDA graph can hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# `.item()`, `bool(tensor)` and `int(tensor)`, and results whose size depends on values.
_READS = frozenset(
    {
        "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
        "unique_consecutive", "repeat_interleave", "is_nonzero", "equal", "bincount",
    }
)  # fmt: skip
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class HostReads(TorchDispatchMode):
    """Context that notes the first such operation.

    Attributes:
        first: its name, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation; note it when it reads."""
        name = func.overloadpacket.__name__
        by_mask = name in _INDEXING and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if self.first is None and (name in _READS or by_mask):
            self.first = name
        run: Callable[..., Any] = func
        return run(*args, **(kwargs or {}))
