"""Damage that keeps sizes is noticed, and what is lost in use ends in one line or in nothing."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import threading
import zlib
from pathlib import Path

import pytest

from data_sources import encode as encode_module
from data_sources import sealed, source_identity
from data_sources.encodings import SFTEncoding
from data_sources.load import load_source
from data_sources.published import opened
from data_sources.records import Message, Record
from data_sources.stored_records import StoredRecords
from rlhf_app import checksums
from rlhf_app.cli import run
from rlhf_app.config.data import DataConfig
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_format import ChatFormat
from tests.unit.data_sources.stored_worker import chat_format

ROWS = 40
RECORD_FILES = (
    *("records.arrow", "uids.bin", "keys.bin", "has_answer.bin", "is_pair.bin", "ends.bin"),
    *("facts.json", "seal.json"),
)
TOKEN_FILES = (
    *("packed.bin", "ends.bin", "lengths.bin", "targets.bin", "margins.bin", "items.bin"),
    *("reasons.bin", "facts.json", "seal.json"),
)


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Every source is large."""
    monkeypatch.setattr(source_identity, "LARGE_BYTES", 0)
    monkeypatch.setattr(encode_module, "SMALL_ROWS", 0)


@pytest.fixture(scope="module")
def fmt() -> ChatFormat:
    return chat_format()


@pytest.fixture
def source(tmp_path: Path) -> SourceConfig:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"p{i}", "response": f"r{i}"} for i in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(path))


def read(source: SourceConfig, cache: Path):
    return load_source(source, verbatim=False, max_bad_fraction=0, cache=cache)[0]


def answers(table) -> list[str]:
    return [record.response for record in table]


def records() -> list[Record]:
    return [Record((Message("user", f"{i}"),), response="ab", uid=f"{i:016x}") for i in range(ROWS)]


def encoded(cache: Path, fmt: ChatFormat):
    data = DataConfig(cache_dir=str(cache), workers=1)
    return encode_module.encode(records(), SFTEncoding(fmt, "", 40, "right"), data)


def only_store(cache: Path, kind: str) -> Path:
    (folder,) = [path for path in (cache / kind).iterdir() if path.is_dir()]
    return folder


def flip(path: Path) -> None:
    """Changes one bit in the middle; size and time of change stay."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_flipped_bit_in_any_file_of_records_is_noticed(tmp_path, source, caplog):
    expected = [f"r{i}" for i in range(ROWS)]
    assert answers(read(source, tmp_path / "c")) == expected
    store = only_store(tmp_path / "c", "records")
    assert {path.name for path in store.iterdir()} == {*RECORD_FILES, "used"}
    for name in RECORD_FILES:
        caplog.clear()
        flip(store / name)
        assert answers(read(source, tmp_path / "c")) == expected
        (line,) = warnings(caplog)
        assert str(store) in line
        assert name in line
        assert "made again" in line
        assert "\n" not in line
        assert only_store(tmp_path / "c", "records") == store


def test_a_flipped_bit_in_any_file_of_tokens_is_noticed(tmp_path, fmt, caplog):
    expected = list(encoded(tmp_path / "c", fmt))
    assert [fmt.tokenizer.decode(e.input_ids) for e in expected[:2]] == ["<s>U0;Aab;", "<s>U1;Aab;"]
    store = only_store(tmp_path / "c", "tokens")
    assert {path.name for path in store.iterdir()} == {*TOKEN_FILES, "used"}
    for name in TOKEN_FILES:
        caplog.clear()
        flip(store / name)
        assert list(encoded(tmp_path / "c", fmt)) == expected
        assert len(warnings(caplog)) == 1
        assert name in warnings(caplog)[0]


@pytest.mark.parametrize("sheet", ["[]", "{}", '{"crc32": 0, "sealed": []}', "[" * 9999, "\xff"])
def test_a_seal_of_any_content_is_damage_and_no_traceback(tmp_path, source, sheet, caplog):
    read(source, tmp_path / "c")
    (only_store(tmp_path / "c", "records") / "seal.json").write_text(sheet, encoding="latin-1")
    assert answers(read(source, tmp_path / "c"))[-1] == f"r{ROWS - 1}"
    assert len(warnings(caplog)) == 1


def test_a_seal_that_still_parses_is_held_to_its_own_checksum(tmp_path, source, caplog):
    read(source, tmp_path / "c")
    path = only_store(tmp_path / "c", "records") / "seal.json"
    text = path.read_text()
    assert "40 records of" in text
    path.write_text(text.replace("40 records of", "41 records of"))
    assert answers(read(source, tmp_path / "c"))[0] == "r0"
    assert "seal.json" in warnings(caplog)[0]
    assert path.read_text() == text


def test_another_source_s_store_under_this_name_is_not_used(tmp_path, source, caplog):
    read(source, tmp_path / "c")
    store = only_store(tmp_path / "c", "records")
    other = Path(source.path).with_name("b.jsonl")
    other.write_text('{"prompt": "p", "response": "wrong"}\n')
    read(SourceConfig(path=str(other)), tmp_path / "d")
    shutil.rmtree(store)
    shutil.copytree(only_store(tmp_path / "d", "records"), store)
    assert answers(read(source, tmp_path / "c"))[0] == "r0"
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("content", ["", "0" * 32, "\xff", "0" * 32 + " " + "0" * 16])
def test_a_damaged_hash_of_a_file_finds_no_other_file_s_records(tmp_path, source, content):
    read(source, tmp_path / "c")
    (known,) = (tmp_path / "c" / "contents").iterdir()
    before = known.read_bytes()
    known.write_text(content, encoding="latin-1")
    read(source, tmp_path / "c")
    only_store(tmp_path / "c", "records")  # none by another name
    assert known.read_bytes() == before


def test_the_checksums_are_those_of_the_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "_PART", 1000)
    monkeypatch.setattr(checksums, "_BLOCK", 300)
    content = os.urandom(2500)
    (tmp_path / "a.bin").write_bytes(content)
    (tmp_path / "empty.bin").touch()
    sealed.seal(tmp_path, "name", "words")
    found = sealed.read_seal(tmp_path)
    parts = (content[:1000], content[1000:2000], content[2000:])
    assert found.files == {"a.bin": (2500, tuple(map(zlib.crc32, parts))), "empty.bin": (0, ())}
    assert (found.name, found.about) == ("name", "words")


def test_what_was_found_whole_is_not_read_again(tmp_path, source, monkeypatch):
    read(source, tmp_path / "c")
    read(source, tmp_path / "c")
    monkeypatch.setattr(checksums, "_sum", None)
    assert answers(read(source, tmp_path / "c"))[0] == "r0"


def test_those_who_notice_at_once_build_once(tmp_path, caplog):
    """The slower one must not throw away what the faster one has built."""
    calls, both = [], threading.Barrier(2, timeout=10)

    def build(folder):
        calls.append(folder)
        (folder / "file").write_text("text")

    def load(folder):
        return (folder / "file").read_text()

    opened(tmp_path, "name", build, load)
    flip(tmp_path / "name" / "file")
    first = threading.local()

    real = sealed.check

    def check(folder):
        try:
            real(folder)
        except sealed.Damaged:
            if not hasattr(first, "seen"):
                first.seen = True
                both.wait()  # both have seen the damage, and neither has the lock yet
            raise

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_sources.published.check", check)
        threads = [
            threading.Thread(target=lambda: found.append(opened(tmp_path, "name", build, load)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert found == ["text", "text"]
    assert len(calls) == 2  # at first, and after the damage
    assert len(warnings(caplog)) == 1


def test_damage_that_comes_back_is_an_error_of_the_setting(tmp_path):
    def load(folder):
        raise OSError("no such device")

    with pytest.raises(ConfigError, match=r"data\.cache_dir: .*name another directory"):
        opened(tmp_path, "name", lambda folder: None, load)


def test_a_cache_that_is_deleted_harms_nobody_who_has_it_open(tmp_path, source, fmt):
    table, examples = read(source, tmp_path / "c"), encoded(tmp_path / "c", fmt)
    expected = list(encoded(tmp_path / "d", fmt))
    shutil.rmtree(tmp_path / "c")
    assert answers(table) == [f"r{i}" for i in range(ROWS)]
    assert table[3].response == "r3"
    assert list(examples) == expected


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    content = bytes(path.stat().st_size)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, (1, 1))  # another time, whatever the clock of the file system


def replace_all(path: Path) -> None:
    """Overwrites it; meanwhile another job has noticed and built it again."""
    copy = path.parent.with_name("copy")
    shutil.copytree(path.parent, copy)
    overwrite(path)
    path.parent.rename(path.parent.with_name("old"))
    copy.rename(path.parent)


@pytest.mark.parametrize("damage", [truncate, overwrite, replace_all])
def test_what_is_lost_in_use_is_one_line_that_names_the_directory(tmp_path, source, fmt, damage):
    table, examples = read(source, tmp_path / "c"), encoded(tmp_path / "c", fmt)
    for kind, file, uses in (
        ("records", "records.arrow", (lambda: table[0], lambda: list(table))),
        ("tokens", "packed.bin", (lambda: examples[0], lambda: examples.targets(0))),
    ):
        folder = only_store(tmp_path / "c", kind)
        damage(folder / file)
        for use in uses:
            with pytest.raises(ConfigError) as caught:
                use()
            line = str(caught.value)
            assert "data.cache_dir" in line
            assert str(folder) in line
            assert "start again" in line
            assert "\n" not in line


def test_files_that_are_only_touched_are_read_on(tmp_path, source, fmt):
    table, examples = read(source, tmp_path / "c"), encoded(tmp_path / "c", fmt)
    for path in (tmp_path / "c").rglob("*.*"):
        if path.is_file():
            os.utime(path, (1, 1))
    assert table[3].response == "r3"
    assert examples[3].input_ids == encoded(tmp_path / "d", fmt)[3].input_ids


def test_a_table_that_is_sent_to_a_process_after_its_files_went_is_one_line(tmp_path, source):
    sent = pickle.dumps(read(source, tmp_path / "c"))
    folder = only_store(tmp_path / "c", "records")
    assert answers(pickle.loads(sent))[0] == "r0"
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .* start again") as caught:
        pickle.loads(sent)
    assert str(folder) in str(caught.value)


def test_the_command_ends_with_2_and_no_traceback(tmp_path, source, monkeypatch, capsys):
    """The store is cut while `rlhf data inspect` has it open."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "c"))
    command = ["data", "inspect", "--data", source.path, "--data-split", "shared", "--limit", "1"]
    assert run([*command, "--stage", "sft"]) == 0
    real = StoredRecords.__init__

    def cut(self, folder):
        real(self, folder)
        os.truncate(folder / "records.arrow", 8)

    monkeypatch.setattr(StoredRecords, "__init__", cut)
    capsys.readouterr()
    assert run([*command, "--stage", "sft"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("rlhf: error")]
    assert "data.cache_dir" in line
    assert str(only_store(tmp_path / "c", "records")) in line
