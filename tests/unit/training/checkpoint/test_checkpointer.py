"""When checkpoints are written, what they bring back, and what happens where they cannot be."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_app.config.checkpoint import CheckpointConfig
from rlhf_app.errors import ConfigError, Interrupted
from rlhf_app.training.checkpoint import checkpointer
from rlhf_app.training.checkpoint.checkpointer import Checkpointer
from rlhf_app.training.checkpoint.requests import Request, ask
from rlhf_app.training.checkpoint.store import CheckpointStore
from rlhf_app.training.distributed import Dist

ALONE = Dist(0, 0, 1, torch.device("cpu"))


class Counter:
    """Remembers a number and a tensor."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "tensor": torch.full((2,), float(self.number))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]
        assert state["tensor"].tolist() == [self.number] * 2


def make(directory: Path, state: Counter, **settings: Any) -> Checkpointer:
    settings = {"every_minutes": None, "at_end": False} | settings
    return Checkpointer(
        CheckpointConfig(**settings),
        directory / "checkpoints",
        directory / "request",
        ALONE,
        total_steps=9,
        engines={},
        state={"counter": state},
    )


@pytest.fixture(autouse=True)
def _no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer.Requests, "listen", lambda self: None)


def written(directory: Path) -> list[int]:
    return CheckpointStore(directory / "checkpoints").steps()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"every_steps": 3}, [6, 3]),  # the last one is a matter of `at_end`
        ({"every_steps": 4}, [8, 4]),
        ({"every_steps": 4, "at_end": True}, [9, 8, 4]),
        ({"at_end": True}, [9]),
        ({"every_minutes": 1e-9}, [8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_when(tmp_path: Path, settings: dict[str, Any], expected: list[int]) -> None:
    checkpoints = make(tmp_path, Counter(), keep=100, **settings)
    assert checkpoints.resume() == 0
    for step in range(1, 10):
        checkpoints.after(step, last=step == 9)
    assert written(tmp_path) == expected


def test_state_comes_back_and_the_best_stays(tmp_path: Path) -> None:
    state = Counter()
    checkpoints = make(tmp_path, state, every_steps=1)
    for step in range(1, 6):
        state.number = step * 10
        checkpoints.after(step)
        if step == 2:
            checkpoints.pin(step)
    assert written(tmp_path) == [5, 4, 2]
    expected = float(torch.rand(()))
    torch.manual_seed(5)
    again = Counter()
    resumed = make(tmp_path, again, every_steps=1)
    assert resumed.resume() == 5
    assert again.number == 50
    assert float(torch.rand(())) == expected
    resumed.after(6)
    assert written(tmp_path) == [6, 5, 2]


def test_requests(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, Counter())
    checkpoints.after(1)
    ask(tmp_path / "request", Request.CHECKPOINT)
    checkpoints.after(2)
    assert written(tmp_path) == [2]
    ask(tmp_path / "request", Request.STOP)
    with pytest.raises(Interrupted, match=r"stopped after step 3 of 9. The same command goes on"):
        checkpoints.after(3)
    assert written(tmp_path) == [3, 2]


def test_without_room_training_goes_on(tmp_path: Path, monkeypatch, caplog) -> None:
    checkpoints = make(tmp_path, Counter(), every_steps=1, keep=5)
    checkpoints.after(1)
    checkpoints.after(2)
    monkeypatch.setattr(Checkpointer, "_free", lambda self: 64 << 20)
    checkpoints.after(3)
    assert written(tmp_path) == [2]  # the older one made room, which was not enough
    assert "no checkpoint of step 3: it takes about" in caplog.text
    ask(tmp_path / "request", Request.STOP)
    with pytest.raises(Interrupted, match=r"could not be written.*goes on after step 2"):
        checkpoints.after(4)


@pytest.mark.parametrize("place", ["directory", "file"])
def test_a_disk_that_refuses_is_a_warning(tmp_path: Path, monkeypatch, caplog, place) -> None:
    checkpoints = make(tmp_path, Counter(), every_steps=1)
    if place == "directory":
        (tmp_path / "checkpoints").write_text("a file")
        wanted = "no checkpoint of step 1: "
    else:

        def fail(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(checkpointer.torch, "save", fail)
        wanted = "no checkpoint of step 1: [Errno 5] Input/output error"
    with caplog.at_level(logging.WARNING):
        checkpoints.after(1)
    assert wanted in caplog.text
    assert not list(tmp_path.glob("checkpoints/*"))


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    make(tmp_path, Counter(), every_steps=1).after(1)
    store = CheckpointStore(tmp_path / "checkpoints")
    index = store.path(1) / "checkpoint.json"
    index.write_text(index.read_text().replace('"world_size": 1', '"world_size": 4'))
    with pytest.raises(ConfigError, match="written by 4 processes and this run has 1"):
        make(tmp_path, Counter()).resume()


def test_damaged_ones_are_set_aside_until_one_is_whole(tmp_path: Path, caplog) -> None:
    checkpoints = make(tmp_path, Counter(), every_steps=1, keep=5)
    for step in (1, 2, 3):
        checkpoints.after(step)
    store = CheckpointStore(tmp_path / "checkpoints")
    (store.path(3) / "rank0.pt").write_bytes(b"")
    (store.path(2) / "checkpoint.json").unlink()
    assert make(tmp_path, Counter()).resume() == 1
    assert "step 3 is damaged (rank0.pt has 0 bytes" in caplog.text
    assert "step 2 is damaged (checkpoint.json is missing" in caplog.text
    assert "goes on from step 1" in caplog.text
    assert sorted(path.name for path in store.directory.glob("damaged_*")) == [
        "damaged_step_00000002",
        "damaged_step_00000003",
    ]
