"""Directories of the cache: built once, published whole, and cleaned of what a crash left."""

import os
import pwd
import socket
import subprocess
import sys
import threading

import pytest

from data_sources.published import cache_root, published
from rlhf_app.errors import ConfigError


def test_it_is_built_once(tmp_path):
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "file").write_text("text")

    for _ in range(2):
        assert (published(tmp_path / "root", "name", build) / "file").read_text() == "text"
    assert len(calls) == 1
    assert {path.name for path in (tmp_path / "root").iterdir()} <= {"name", "name.lock"}


def test_a_failure_publishes_nothing(tmp_path):
    def build(folder):
        (folder / "file").write_text("half")
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        published(tmp_path, "name", build)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_threads_wait_for_the_builder(tmp_path):
    started, go, calls = threading.Event(), threading.Event(), []

    def build(folder):
        calls.append(1)
        started.set()
        go.wait(10)

    threads = [threading.Thread(target=published, args=(tmp_path, "n", build)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    go.set()
    for thread in threads:
        thread.join(20)
    assert calls == [1]


def test_without_locks_the_second_result_is_dropped(tmp_path):
    def build(folder):
        (tmp_path / "name").mkdir()  # someone else was faster
        (tmp_path / "name" / "file").write_text("first")
        (folder / "file").write_text("second")

    assert (published(tmp_path, "name", build) / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["name"]


def test_what_a_dead_process_left_is_removed(tmp_path):
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True
    )
    host = socket.gethostname()
    dead = tmp_path / f"name.tmp.{host}.{int(gone.stdout)}.abc"
    mine = tmp_path / f"name.tmp.{host}.{os.getpid()}.abc"
    elsewhere = tmp_path / f"name.tmp.other-{host}.1.abc"
    for folder in (dead, mine, elsewhere):
        folder.mkdir()
    published(tmp_path, "name", lambda folder: None)
    assert not dead.exists()
    assert mine.exists()
    assert elsewhere.exists()


@pytest.mark.parametrize("kind", ["file", "link to nothing", "link to a file"])
def test_what_is_no_directory_is_put_aside(tmp_path, kind, caplog):
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    if kind == "link to a file":
        other.write_text("someone's")
    if kind == "file":
        (root / "name").write_text("")
    else:
        (root / "name").symlink_to(other)
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "file").write_text("text")

    for _ in range(2):
        assert (published(root, "name", build) / "file").read_text() == "text"
    assert len(calls) == 1
    assert not (root / "name").is_symlink()
    assert "is damaged and will be made again" in caplog.text
    assert {path.name for path in root.iterdir()} <= {"name", "name.lock"}
    assert not other.exists() or other.read_text() == "someone's"


def test_a_root_that_is_a_file_is_an_error_of_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache_dir"):
        published(tmp_path / "file", "name", lambda folder: None)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("RLHF_CACHE", raising=False)
    assert str(cache_root(None)) == "/h/.cache/rlhf"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache_root(None)) == "/x/rlhf"
    monkeypatch.setenv("RLHF_CACHE", "/r")
    assert str(cache_root(None)) == "/r"
    assert str(cache_root("/s")) == "/s"


def test_a_cache_in_no_known_home_names_the_setting(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("RLHF_CACHE", "~no.such.user/c")
    with pytest.raises(ConfigError, match=r"data\.cache_dir: no home .* for ~no\.such\.user/c"):
        cache_root(None)
    monkeypatch.delenv("RLHF_CACHE")
    # A user without an entry, as in containers that run under any number.
    monkeypatch.delenv("HOME", raising=False)

    def nobody(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(ConfigError, match=r"data\.cache_dir: no home directory is known"):
        cache_root(None)
