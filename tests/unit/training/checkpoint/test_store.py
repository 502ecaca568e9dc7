"""Checkpoints on disk: whole or absent, and known to be what was written."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from rlhf_app.training.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    describe_files,
    files_in,
)


def write(store: CheckpointStore, step: int, content: bytes = b"weights") -> Checkpoint:
    directory = store.begin(step)
    (directory / "actor").mkdir()
    (directory / "actor" / "a.pt").write_bytes(content)
    (directory / "rank0.pt").write_bytes(b"r")
    files = describe_files(directory, files_in(directory))
    checkpoint = Checkpoint(step, 9, 2, files)
    store.finish(checkpoint)
    return checkpoint


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_what_was_written_is_read_and_found_whole(store: CheckpointStore) -> None:
    write(store, 3)
    found = store.newest()
    assert found is not None
    assert (found.step, found.total_steps, found.world_size) == (3, 9, 2)
    assert found.files == {
        "actor/a.pt": (7, (zlib.crc32(b"weights"),)),
        "rank0.pt": (1, (zlib.crc32(b"r"),)),
    }
    assert found.num_bytes == 8
    assert store.damage(found, found.files) is None
    assert (store.directory / "latest").read_text() == "step_00000003\n"
    assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "step_00000003"]


@pytest.mark.parametrize(
    ("hurt", "message"),
    [
        (lambda path: path.write_bytes(b"weightt"), "actor/a.pt is not what was written"),
        (lambda path: path.write_bytes(b"w"), "actor/a.pt has 1 bytes instead of 7"),
        (lambda path: path.unlink(), "actor/a.pt: No such file or directory"),
    ],
)
def test_damage_is_named(store: CheckpointStore, hurt, message: str) -> None:
    checkpoint = write(store, 3)
    hurt(store.path(3) / "actor" / "a.pt")
    assert store.damage(checkpoint, checkpoint.files) == message
    assert store.damage(checkpoint, ["rank0.pt"]) is None  # another rank's share


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"step": 4, "total_steps": 9, "world_size": 1, "files": {}}',
        '{"step": 3, "total_steps": 9, "world_size": 1, "files": {"../../x": [1, [5]]}}',
        '{"step": 3, "total_steps": 9, "world_size": 1, "files": {"/etc/passwd": [1, [5]]}}',
        '{"step": 3, "total_steps": 9, "world_size": 1, "files": {"a": [1]}}',
    ],
)
def test_an_index_that_is_none_is_not_taken_for_one(store: CheckpointStore, text: str) -> None:
    write(store, 2)
    write(store, 3)
    (store.path(3) / "checkpoint.json").write_text(text)
    assert store.read(3) is None
    newest = store.newest()
    assert newest is not None
    assert newest.step == 2


def test_an_unfinished_one_is_none_and_goes_with_the_next(store: CheckpointStore) -> None:
    directory = store.begin(4)
    (directory / "a.pt").write_bytes(b"half")
    assert store.steps() == []
    write(store, 5)
    assert store.steps() == [5]
    assert not directory.exists()


def test_the_same_step_again_takes_the_first_ones_place(store: CheckpointStore) -> None:
    write(store, 5, b"before evaluation")
    write(store, 5, b"after")
    assert (store.path(5) / "actor" / "a.pt").read_bytes() == b"after"
    assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "step_00000005"]


def test_the_newest_stay_and_the_pinned_one(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 100_000_000, 4):
        write(store, step)
    assert store.steps() == [100_000_000, 4, 3, 2, 1]
    store.prune(2, pinned=2)
    assert store.steps() == [100_000_000, 4, 2]
    store.prune(1)
    assert store.steps() == [100_000_000]


def test_a_damaged_one_is_kept_for_people_alone(store: CheckpointStore) -> None:
    write(store, 6)
    kept = store.set_aside(6)
    assert (kept / "rank0.pt").read_bytes() == b"r"
    assert store.steps() == []
    write(store, 6)
    assert store.set_aside(6) == kept


def test_an_index_is_the_last_thing_written(store: CheckpointStore, monkeypatch) -> None:
    """Whatever is interrupted, a directory with an index has all its files."""
    directory = store.begin(7)
    (directory / "a.pt").write_bytes(b"a")
    files = describe_files(directory, ["a.pt"])

    def cut_off(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut_off)
        with pytest.raises(KeyboardInterrupt):
            store.finish(Checkpoint(7, 9, 1, files))
    assert store.steps() == []
    assert json.loads((directory / "checkpoint.json").read_text())["step"] == 7
    assert not (store.directory / "latest").exists()
