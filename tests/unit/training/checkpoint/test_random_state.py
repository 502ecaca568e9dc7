"""The random generators go on where they were."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from rlhf_app.training.checkpoint.random_state import random_state, set_random_state


def draw() -> list[float]:
    # An odd number of normal draws: half of a pair is left in the generators of two libraries.
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        float(torch.rand(())),
        float(torch.randn(3)[0]),
    ]


def test_draws_go_on_after_a_file_and_a_weights_only_load(tmp_path: Path) -> None:
    draw()
    torch.save(random_state(), tmp_path / "state.pt")
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert [draw(), draw()] != expected
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draw(), draw()] == expected
