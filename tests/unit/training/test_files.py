from __future__ import annotations

import json

import pytest

from rlhf_app.training.files import atomic_directory, atomic_write_json
from rlhf_app.training.metrics import MetricsWriter


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "result.json"
    atomic_write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        atomic_write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_json_holds_no_number_that_is_not_finite(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        atomic_write_json(tmp_path / "result.json", {"score": {"mean": number}})
    assert list(tmp_path.iterdir()) == []


def test_directory_appears_only_on_success(tmp_path):
    target = tmp_path / "model"
    with atomic_directory(target) as temporary:
        (temporary / "new").write_text("1")
        assert not target.exists()
    assert (target / "new").read_text() == "1"


def test_failure_leaves_the_old_directory(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("1")

    def write_half() -> None:
        with atomic_directory(target) as temporary:
            (temporary / "new").write_text("2")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert [p.name for p in target.iterdir()] == ["old"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_success_replaces_the_old_directory(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("1")
    with atomic_directory(target) as temporary:
        (temporary / "new").write_text("2")
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_metrics_lines(tmp_path):
    writer = MetricsWriter(tmp_path / "a" / "metrics.jsonl")
    writer.write(kind="train", step=1, total_steps=2, loss=0.5, grad_norm=float("inf"))
    # Each line is there at once for whoever follows the file.
    (line,) = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time") > 0
    assert record == {"step": 1, "total_steps": 2, "kind": "train", "loss": 0.5, "grad_norm": None}
    writer.close()


def test_metrics_of_other_ranks_write_nothing(tmp_path):
    MetricsWriter(tmp_path / "metrics.jsonl", enabled=False).write(
        kind="eval", step=1, total_steps=2
    )
    assert list(tmp_path.iterdir()) == []


def test_files_of_an_artifact_get_the_mode_of_the_umask(tmp_path):
    import os

    before = os.umask(0o027)
    try:
        with atomic_directory(tmp_path / "model") as directory:
            (directory / "weights").write_text("w")
            (directory / "weights").chmod(0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "model" / "weights").stat().st_mode & 0o777 == 0o640
