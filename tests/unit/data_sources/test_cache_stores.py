"""`rlhf data cache`: what lies there, and that only what is nobody's and the cache's is removed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data_sources import encode as encode_module
from data_sources import source_identity
from data_sources.cache_stores import clear, stores
from data_sources.encodings import SFTEncoding
from data_sources.held_files import HeldFiles
from data_sources.load import load_source
from data_sources.published import building, published
from data_sources.sealed import SEAL
from data_sources.selection import Selected
from rlhf_app.cli import run
from rlhf_app.config.data import DataConfig
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError
from tests.unit.data_sources.stored_worker import chat_format

OLD, NEW, LEFT = "a" * 32, "sft-" + "b" * 32, "c" * 32
DAY = 86_400


def store(root: Path, part: str, name: str, about: str, size: int, days: float) -> Path:
    """A store whose files have `size` bytes but for the seal, used so many days ago."""

    def build(folder: Path) -> str:
        (folder / "packed.bin").write_bytes(bytes(size))
        return about

    folder = published(root / part, name, build)
    age(folder / "used", days)
    return folder


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two stores, what a dead process left, a remembered hash, and files of others."""
    root = tmp_path / "c"
    store(root, "records", OLD, "3 records of pairs.jsonl", 1000, 10)
    store(root, "tokens", NEW, "2 rows of x, at most 9 tokens of gpt2", 3000, 1)
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    dead = root / "records" / f"{LEFT}.tmp.{socket.gethostname()}.{int(gone.stdout)}.abcd"
    dead.mkdir()
    (dead / "uids.bin").write_bytes(bytes(7))
    for path in (dead / "uids.bin", dead):
        age(path, 5)
    (root / "contents").mkdir()
    (root / "contents" / ("d" * 32)).write_text("hash")
    (root / "contents" / "notes.txt").write_text("mine")
    (root / "records" / "mine").mkdir()
    (root / "records" / "mine" / "packed.bin").write_text("mine")
    (root / "models").mkdir()
    (root / "models" / OLD).write_text("mine")
    return root


def names(root: Path) -> set[str]:
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    return {name for name in found if not name.endswith(".lock")}


FOREIGN = {"contents/notes.txt", "records/mine/packed.bin", f"models/{OLD}"}


def test_the_list_says_what_lies_there(root):
    found = stores(root)
    assert [(s.kind, s.about, s.in_use) for s in found] == [
        ("tokens (sft)", "2 rows of x, at most 9 tokens of gpt2", False),
        ("unfinished records", "left by a process that was stopped", False),
        ("records", "3 records of pairs.jsonl", False),
    ]
    seal = (root / "tokens" / NEW / SEAL).stat().st_size
    assert (found[0].size, found[1].size) == (3000 + seal, 7)
    ages = [(time.time() - s.used) / DAY for s in found]
    assert ages == pytest.approx([1, 5, 10], abs=0.01)


def test_the_command_lists_and_clears(root, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["data", "cache", "--cache-dir", str(root)]) == 0
    shown = capsys.readouterr().out
    day = time.strftime("%Y-%m-%d", time.localtime(time.time() - 10 * DAY))
    for text in (f"tokens/{NEW}", "3 records of pairs.jsonl", day, "3 stores", "KiB"):
        assert text in shown
    before = names(root)
    assert run(["data", "cache", "--cache-dir", str(root), "--clear", "--older-than", "7"]) == 0
    assert "removed 1 stores" in capsys.readouterr().out
    assert {name for name in before - names(root) if OLD not in name} == set()
    assert not (root / "records" / OLD).exists()
    monkeypatch.setenv("RLHF_CACHE", str(root))
    assert run(["data", "cache", "--clear"]) == 0
    assert names(root) == FOREIGN
    assert run(["data", "cache"]) == 0
    assert "0 stores, 0 bytes" in capsys.readouterr().out


def test_a_cache_that_is_not_there_is_empty(tmp_path, capsys):
    for flags in ([], ["--clear"]):
        assert run(["data", "cache", "--cache-dir", str(tmp_path / "none"), *flags]) == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--older-than", "3"], "--clear"),
        (["--clear", "--older-than", "-1"], "--older-than"),
        (["--clear", "--older-than", "nan"], "--older-than"),
        (["--clear", "--older-than", "soon"], "--older-than"),
    ],
)
def test_bad_flags_end_with_2(root, capsys, flags, named):
    before = names(root)
    assert run(["data", "cache", "--cache-dir", str(root), *flags]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error
    assert names(root) == before


def test_a_cache_that_is_a_file_ends_with_2(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert run(["data", "cache", "--clear", "--cache-dir", str(tmp_path / "file")]) == 2
    assert "name a directory" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


USER = """
import sys
from pathlib import Path
from data_sources.held_files import HeldFiles
held = HeldFiles(Path(sys.argv[1]), ["packed.bin"])
print("open", flush=True)
sys.stdin.read()
"""


def test_what_a_living_process_uses_stays_until_it_is_killed(root, repo_root):
    folder = root / "records" / OLD
    user = subprocess.Popen(
        [sys.executable, "-c", USER, str(folder)],
        cwd=repo_root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert user.stdout.readline() == "open\n"
        age(folder / "used", 10)
        assert [s.in_use for s in stores(root) if s.folder == folder] == [True]
        assert (folder, "in use") in clear(root, 7).kept
        assert clear(root).kept == [(folder, "in use")]
        assert (folder / "packed.bin").stat().st_size == 1000
    finally:
        user.kill()
        user.communicate()
    assert [s.folder for s in clear(root).removed] == [folder]


def test_opening_is_a_use_and_closing_ends_it(root):
    folder = root / "records" / OLD
    held = HeldFiles(folder, ["packed.bin"])
    assert time.time() - (folder / "used").stat().st_mtime < 60
    assert clear(root).kept == [(folder, "in use")]
    del held
    assert len(clear(root).removed) == 1


def test_what_is_being_built_stays(root):
    folder = root / "records" / f"{LEFT}.tmp.{socket.gethostname()}.{os.getpid()}.abcd"
    folder.mkdir()
    assert (folder, "in use") in clear(root).kept
    elsewhere = root / "tokens" / f"{NEW}.tmp.other-host.1.abcd"
    elsewhere.mkdir()
    assert (elsewhere, "in use") in clear(root).kept
    age(elsewhere, 2)
    with building(root / "tokens", NEW):
        assert (elsewhere, "in use") in clear(root).kept
    assert elsewhere in [s.folder for s in clear(root).removed]


def test_nothing_beyond_a_link_is_touched(root, tmp_path):
    outside = tmp_path / "outside"
    other = store(outside, "records", OLD, "", 5, 10)
    (root / "records" / ("e" * 32)).symlink_to(other)
    inside = store(root, "records", "f" * 32, "", 5, 10)
    (inside / "margins.bin").symlink_to(other / "packed.bin")
    second = tmp_path / "second"
    second.mkdir()
    (second / "records").symlink_to(outside / "records")
    (second / "contents").symlink_to(outside / "records" / OLD)
    before = names(outside)
    result = clear(root)
    assert [path for path, _ in result.kept] == [inside]
    assert (root / "records" / ("e" * 32)).is_symlink()
    assert clear(second).removed == []
    assert names(outside) == before


def test_a_store_with_somebody_s_file_stays_whole(root):
    folder = root / "records" / OLD
    (folder / "thesis.txt").write_text("mine")
    assert clear(root).kept == [(folder, "holds thesis.txt, which is not the cache's")]
    assert {path.name for path in folder.iterdir()} == {"packed.bin", "seal.json", "used"} | {
        "thesis.txt"
    }


def test_what_cannot_be_removed_is_named_and_the_rest_goes(root, monkeypatch):
    real = Path.rename

    def rename(self, target):
        if self.name == OLD:
            raise PermissionError(13, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ConfigError, match=rf"1 stores cannot be removed.*{OLD} \(Permission"):
        clear(root)
    assert [s.folder.name for s in stores(root)] == [OLD]


def test_real_stores_say_what_they_were_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(source_identity, "LARGE_BYTES", 0)
    monkeypatch.setattr(encode_module, "SMALL_ROWS", 0)
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "response": "r"}\n' * 3)
    table, _ = load_source(
        SourceConfig(path=str(path)), verbatim=False, max_bad_fraction=0, cache=tmp_path / "c"
    )
    fmt = chat_format()
    fmt.tokenizer.name_or_path = "some/model"
    rows = Selected.joined([table], [False], [np.array([0, 2])])
    data = DataConfig(cache_dir=str(tmp_path / "c"), workers=1)
    encode_module.encode(rows, SFTEncoding(fmt, "", 40, "right"), data)
    found = {s.kind: s.about for s in stores(tmp_path / "c")}
    assert found == {
        "records": f"3 records of {path}",
        "tokens (sft)": "2 rows of a.jsonl, at most 40 tokens of some/model",
    }
