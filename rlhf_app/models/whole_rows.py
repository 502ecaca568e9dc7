"""Forwards over rows that hold one sequence each, which transformers need not look for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_app.hybrid_engine.temporarily import temporarily

_SEARCH = "find_packed_sequence_indices"


@contextmanager
def whole_rows() -> Iterator[None]:
    """No forward in the context reads position ids on the host. Also a decorator.

    Without a mask transformers looks in the position ids for several sequences packed into a
    row, and waits for the device to see that there are none: once a forward, with every family
    that has rotary positions.
    """
    from transformers import masking_utils

    having = [masking_utils] if hasattr(masking_utils, _SEARCH) else []
    with temporarily(having, _SEARCH, lambda position_ids: None):
        yield
