"""Paths that begin with ~: a user's home, or a file of such a name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_app.config.schema import SourceConfig
from rlhf_app.home import expanded

ROOT = Path(__file__).parents[3]
STRANGE = "~no.such.user.jsonl"


def test_homes_are_put_in(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~") == Path("/home/me")
    assert expanded(Path("~/a//b")) == Path("/home/me/a/b")
    assert SourceConfig(path="~/a.jsonl").path == "/home/me/a.jsonl"
    for same in ("a/~", "./~x", "", "/~/x", STRANGE):
        assert expanded(same) == Path(same)


def test_a_file_whose_name_begins_with_a_tilde_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / STRANGE).write_text("")
    assert SourceConfig(path=STRANGE).path == STRANGE
    (tmp_path / STRANGE).unlink()
    with pytest.raises(ValueError, match=r"no home directory is known for ~no\.such\.user\.jsonl"):
        SourceConfig(path=STRANGE)


def test_no_code_expands_homes_by_itself():
    """`Path.expanduser` fails with a traceback where there is no such user."""
    files = [
        path
        for name in ("rlhf_app", "data_sources", "stages")
        for path in (ROOT / name).rglob("*.py")
    ]
    assert len(files) > 100
    own = re.compile(r"\)\.expanduser\(|Path\.home\(")
    assert [str(path) for path in files if own.search(path.read_text(encoding="utf-8"))] == []
