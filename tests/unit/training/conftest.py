"""A process group of one, shared by the tests of this package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhf_app.training.distributed import Dist, close, setup


@pytest.fixture(scope="module")
def dist() -> Iterator[Dist]:
    """This process alone, on the CPU or the first GPU."""
    yield setup()
    close()
