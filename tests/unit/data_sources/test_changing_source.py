"""A source that changes while it is read: its rows never lie under the name of other content."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from data_sources import load, source_identity
from data_sources.load import load_source
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError


def rows(answer: str, number: int = 6) -> str:
    return "".join(
        json.dumps({"prompt": f"p{i}", "response": f"{answer}{i}"}) + "\n" for i in range(number)
    )


def append(folder: Path) -> None:
    with (folder / "b.jsonl").open("a") as file:
        file.write(rows("other"))


def replace(folder: Path) -> None:
    (folder / "b.new").write_text(rows("other"))
    (folder / "b.new").replace(folder / "b.jsonl")


def replace_and_restore(folder: Path) -> None:
    (folder / "b.jsonl").rename(folder / "b.old")
    (folder / "b.jsonl").write_text(rows("other"))
    list(load_source(SourceConfig(path=str(folder)), verbatim=False, max_bad_fraction=0)[0])
    (folder / "b.old").replace(folder / "b.jsonl")


def write_in_place_with_the_old_time(folder: Path) -> None:
    before = (folder / "b.jsonl").stat()
    (folder / "b.jsonl").write_text(rows("s"))
    os.utime(folder / "b.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(folder: Path) -> None:
    (folder / "b.jsonl").write_text(rows("r", 1))


def remove(folder: Path) -> None:
    (folder / "a.jsonl").unlink()


def edit_the_normaliser(folder: Path) -> None:
    (folder.parent / "mine.py").write_text("def f(row): return {'prompt': 'x'}\n")


CHANGES = (
    *(append, replace, replace_and_restore, write_in_place_with_the_old_time, cut, remove),
    edit_the_normaliser,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_changed_rows_are_not_kept(tmp_path, monkeypatch, change, when):
    monkeypatch.setattr(source_identity, "LARGE_BYTES", 0)
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").write_text(rows("r"))
    shutil.copytree(folder, tmp_path / "kept")
    code = tmp_path / "mine.py"
    code.write_text("def f(row): return row\n")
    mine = f"{code}:f" if change is edit_the_normaliser else None
    source = SourceConfig(path=str(folder), normaliser=mine)
    real = load.write_records

    def write(*args):
        if when == "before":
            change(folder)
        real(*args)
        if when == "after":
            change(folder)

    options = {"verbatim": False, "max_bad_fraction": 0, "cache": tmp_path / "cache", "workers": 1}
    monkeypatch.setattr(load, "write_records", write)
    with pytest.raises(ConfigError, match="data changed while it was read; start again"):
        load_source(source, **options)
    assert not [path for path in (tmp_path / "cache" / "records").iterdir() if path.is_dir()]

    # As it was at first: what is found is what is there.
    monkeypatch.setattr(load, "write_records", real)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "kept", folder)
    code.write_text("def f(row): return row\n")
    table, counts = load_source(source, **options)
    assert [record.response for record in table] == [f"r{i}" for i in range(6)] * 2
    assert counts.read == 12
