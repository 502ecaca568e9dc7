"""A growing file continues without gaps or doubles."""

from __future__ import annotations

from pathlib import Path

from rlhf_app.training.appended_file import AppendedFile


def test_later_lines_are_dropped_and_earlier_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "a" / "metrics.jsonl"
    first = AppendedFile(path)
    first.write_lines(["one", "zwölf"])
    state = first.state_dict()
    first.write_lines(["lost"])
    second = AppendedFile(path)
    second.load_state_dict(state)
    second.write_lines(["three"])
    assert path.read_text(encoding="utf-8") == "one\nzwölf\nthree\n"
    assert second.state_dict() == {"bytes": len("one\nzwölf\nthree\n".encode())}


def test_a_fresh_one_drops_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n")
    AppendedFile(path).write_lines(["new"])
    assert path.read_text() == "new\n"


def test_lines_that_somebody_cut_off_are_missed_aloud(tmp_path: Path, caplog) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("one\ntw")
    file = AppendedFile(path)
    file.load_state_dict({"bytes": 8})
    file.write_lines(["three"])
    assert path.read_text() == "one\nthree\n"
    assert "are missing" in caplog.text


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "metrics.jsonl", enabled=False)
    file.write_lines(["one"])
    file.load_state_dict(file.state_dict())
    file.write_lines(["two"])
    assert not (tmp_path / "metrics.jsonl").exists()
