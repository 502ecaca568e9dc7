"""Records of large sources: what lies in files is what was read, and nothing stale is found."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_sources import load, source_identity
from data_sources.counts import SourceCounts
from data_sources.identity import content_uid, prompt_key
from data_sources.load import load_source
from data_sources.processes import in_order
from data_sources.record_table import ListedRecords
from data_sources.records import Message, Record, TokenIds
from data_sources.stored_records import StoredRecords, packed, write_records
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError

TALK = (Message("system", "s"), Message("user", "é \U0001f600\ud800\0"), Message("assistant", "x"))
RECORDS = [
    Record(TALK, response="yes\n"),
    Record((Message("user", "q"),), chosen="a", rejected="", margin=0.1, rendered=True),
    Record((), chosen="long" * 20_000, rejected="b", margin=-2.5),
    Record((Message("tool", "t"),), ids=TokenIds("hash", (1, 2), (), (2**31 - 1,), (3,))),
]


class Given:
    """Makes records of records."""

    def records(self, rows, counts):
        counts.records += len(rows)
        return iter(rows)


def named(records):
    return [replace(r, uid=content_uid(r), source="file.jsonl") for r in records]


@pytest.fixture
def large(monkeypatch):
    """Every source is large."""
    monkeypatch.setattr(source_identity, "LARGE_BYTES", 0)
    monkeypatch.setattr(source_identity, "LARGE_ROWS", 0)


def write(path: Path, rows: list[dict[str, object]]) -> SourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(path))


def read(source, cache, **options):
    options = {"verbatim": False, "max_bad_fraction": 0.5} | options
    return load_source(source, cache=cache, **options)


def built(cache: Path) -> set[str]:
    return {place.name for place in (cache / "records").iterdir() if place.is_dir()}


@pytest.mark.parametrize("repeats", [0, 1, 300])  # 300: beyond a batch of the file
def test_records_come_back_as_they_were(tmp_path, repeats):
    records = named(RECORDS * repeats)
    maker = Given()
    parts = [
        packed(maker, records[: len(records) // 3]),
        packed(maker, records[len(records) // 3 :]),
    ]
    write_records(tmp_path, "file.jsonl", iter(parts), SourceCounts("p"))
    table = StoredRecords(tmp_path)
    assert list(table) == records
    assert [table[i] for i in range(len(table))] == records
    assert table[1:3] == records[1:3]
    assert list(pickle.loads(pickle.dumps(table))) == records
    with pytest.raises(IndexError):
        table[len(records)]
    listed = ListedRecords(records)
    assert list(listed) == records
    for one in (table, listed):
        assert one.uids_N.dtype == one.keys_N.dtype == np.uint64
        assert [f"{n:016x}" for n in one.uids_N.tolist()] == [r.uid for r in records]
        assert [f"{n:016x}" for n in one.keys_N.tolist()] == [
            prompt_key(r.messages) for r in records
        ]
        assert one.has_answer_N.tolist() == [True, True, True, False] * repeats
        assert one.is_pair_N.tolist() == [False, True, True, False] * repeats


def test_counts_come_back_with_the_records(tmp_path, large):
    rows = [{"prompt": f"p{i}", "response": "r"} for i in range(3)] + [{"prompt": None}] * 2
    source = write(tmp_path / "a.jsonl", rows)
    _, first = read(source, tmp_path / "cache")
    table, again = read(source, tmp_path / "cache")
    _, in_memory = read(source, None)
    assert isinstance(table, StoredRecords)
    assert first == again == in_memory
    assert (again.read, again.usable, again.records) == (5, 3, 3)
    assert again.unusable["prompt is empty"] + again.unusable.total() > 0


def test_a_second_start_reads_no_row(tmp_path, large, monkeypatch):
    source = write(tmp_path / "a.jsonl", [{"prompt": "p", "response": "r"}])
    table, _ = read(source, tmp_path / "cache")
    expected = list(table)
    monkeypatch.setattr(load, "_recognised", None)
    assert list(read(source, tmp_path / "cache")[0]) == expected


def test_a_small_source_writes_nothing(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"prompt": "p", "response": "r"}])
    table, _ = read(source, tmp_path / "cache")
    assert isinstance(table, ListedRecords)
    assert not (tmp_path / "cache").exists()


def test_complaint_dse437_dse822_dsc19_changed_content_of_one_size_is_read(tmp_path, large):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    source = write(path, [{"prompt": "p", "response": "old"}])
    before = path.stat()
    assert read(source, cache)[0][0].response == "old"
    write(path, [{"prompt": "p", "response": "new"}])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert read(source, cache)[0][0].response == "new"
    # The same content elsewhere is not read again, unless rows would have another name.
    (tmp_path / "b").mkdir()
    moved = path.rename(tmp_path / "b" / "a.jsonl")
    read(SourceConfig(path=str(moved)), cache)
    assert len(built(cache)) == 2
    read(SourceConfig(path=str(moved.rename(tmp_path / "c.jsonl"))), cache)
    assert len(built(cache)) == 3


def test_whatever_decides_the_records_names_them(tmp_path, large, monkeypatch):
    source = write(tmp_path / "a.jsonl", [{"prompt": "p", "response": " r", "answer_b": "b"}])
    cache = tmp_path / "cache"
    code = tmp_path / "mine.py"
    code.write_text("def f(row): return {'prompt': row['prompt'], 'response': '1'}\n")
    mine = source.model_copy(update={"normaliser": f"{code}:f"})
    assert read(source, cache)[0][0].response == "r"
    assert read(source, cache, verbatim=True)[0][0].response == " r"
    columns = source.model_copy(update={"columns": {"response": "answer_b"}})
    assert read(columns, cache)[0][0].response == "b"
    assert read(mine, cache)[0][0].response == "1"
    code.write_text(code.read_text().replace("'1'", "'2'"))
    assert len(built(cache)) == 4
    monkeypatch.setattr(source_identity, "version", lambda name: "0")
    read(source, cache)
    assert len(built(cache)) == 5
    # What only decides which records are used finds the same ones.
    read(source.model_copy(update={"weight": 2.0, "max_rows": 1, "stages": ("sft",)}), cache)
    assert len(built(cache)) == 5


@pytest.mark.parametrize("damage", ["cut", "gone", "facts"])
def test_a_damaged_store_is_made_again(tmp_path, large, caplog, damage):
    source = write(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "response": "r"} for i in range(9)])
    expected = list(read(source, tmp_path / "cache")[0])
    (name,) = built(tmp_path / "cache")
    texts = tmp_path / "cache" / "records" / name / "records.arrow"
    if damage == "cut":
        os.truncate(texts, texts.stat().st_size // 2)
    elif damage == "gone":
        texts.unlink()
    else:
        (texts.parent / "facts.json").write_text("{")
    assert list(read(source, tmp_path / "cache")[0]) == expected
    assert "damaged" in caplog.text
    assert built(tmp_path / "cache") == {name}


def test_a_source_that_fails_leaves_nothing(tmp_path, large):
    rows = [{"prompt": "p", "response": "r"}] + [{"prompt": None, "response": "r"}] * 3
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match="3 of 4 rows are unusable"):
        read(source, tmp_path / "cache")
    assert built(tmp_path / "cache") == set()
    assert len(read(source, tmp_path / "cache", max_bad_fraction=0.8)[0]) == 1
    # What is found later is held to the limit too.
    with pytest.raises(ConfigError, match="3 of 4 rows are unusable"):
        read(source, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_names_its_setting(tmp_path, large):
    source = write(tmp_path / "a.jsonl", [{"prompt": "p", "response": "r"}])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache_dir") as caught:
        read(source, tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_saved_datasets_and_compressed_directories_are_kept_too(tmp_path, large):
    import datasets

    rows = [{"prompt": f"p{i}", "response": "r"} for i in range(4)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    source = SourceConfig(path=str(tmp_path / "saved"))
    assert len(read(source, tmp_path / "cache")[0]) == 4
    assert len(built(tmp_path / "cache")) == 1
    read(source, tmp_path / "cache")
    assert len(built(tmp_path / "cache")) == 1
    datasets.Dataset.from_list([*rows, *rows]).save_to_disk(tmp_path / "saved2")
    assert len(read(SourceConfig(path=str(tmp_path / "saved2")), tmp_path / "cache")[0]) == 8


def test_columns_are_looked_for_in_the_first_rows_and_renamed_in_all(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_FIRST_ROWS", 2)
    source = write(tmp_path / "a.jsonl", [{"q": str(i), "a": f"{i}!"} for i in range(5)])
    renamed = source.model_copy(update={"columns": {"prompt": "q", "response": "a"}})
    table, counts = read(renamed, None)
    assert [record.response for record in table] == [f"{i}!" for i in range(5)]
    assert counts.read == 5


def rows_of(path, number):
    odd = {7: "{", 13: '{"prompt": null, "chosen": "a", "rejected": "b"}'}
    good = '{"prompt": "p%d", "chosen": "a%d", "rejected": "b"}'
    path.write_text("".join(odd.get(i % 20, good % (i, i)) + "\n" for i in range(number)))
    return SourceConfig(path=str(path))


@pytest.mark.parametrize("workers", [1, 2])
def test_many_parts_and_processes_give_what_one_pass_gives(tmp_path, large, monkeypatch, workers):
    monkeypatch.setattr(load, "_PART_ROWS", 30)
    source = rows_of(tmp_path / "a.jsonl", 205)
    expected, counts = read(source, None)
    table, stored_counts = read(source, tmp_path / "cache", workers=workers)
    assert list(table) == list(expected)
    assert [table[i] for i in range(len(table))] == list(expected)
    assert stored_counts == counts
    assert (counts.read, counts.records, counts.unusable.total()) == (205, 185, 20)


def test_a_normaliser_that_no_process_can_receive_works_in_this_one(tmp_path, large, monkeypatch):
    monkeypatch.setattr(load, "_PART_ROWS", 30)
    code = tmp_path / "mine.py"
    code.write_text("def f(row): return {'prompt': row['prompt'], 'response': row['chosen']}\n")
    source = rows_of(tmp_path / "a.jsonl", 100)
    mine = source.model_copy(update={"normaliser": f"{code}:f"})
    assert list(read(mine, tmp_path / "cache", workers=2)[0]) == list(read(mine, None)[0])


def _times_ten(number):
    return number * 10


def _dies_at_five(number):
    if number == 5 and multiprocessing.parent_process() is not None:
        os._exit(1)
    return number * 10


@pytest.mark.slow
def test_parts_keep_their_order_and_survive_a_process_that_is_killed(caplog):
    expected = [number * 10 for number in range(20)]
    assert list(in_order(_times_ten, range(20), 2)) == expected
    assert list(in_order(_times_ten, iter(range(1)), 2)) == [0]
    assert "goes on alone" not in caplog.text
    assert list(in_order(_dies_at_five, range(20), 2)) == expected
    assert "goes on alone" in caplog.text


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_processes_too(tmp_path, large, monkeypatch):
    def full(folder, source, parts, counts):
        next(iter(parts))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(load, "_PART_ROWS", 30)
    monkeypatch.setattr(load, "write_records", full)
    source = rows_of(tmp_path / "a.jsonl", 300)
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .*No space left") as caught:
        read(source, tmp_path / "cache", workers=2)
    # While the error, and all that its traceback holds, is still there.
    assert caught.value is not None
    assert multiprocessing.active_children() == []
    assert built(tmp_path / "cache") == set()


def _own_number(_):
    return os.getpid()


ORPHANS = """
    import os, signal
    from data_sources.processes import in_order
    from tests.unit.data_sources.test_stored_records import _own_number
    if __name__ == "__main__":
        results = in_order(_own_number, range(100), 2)
        print(next(results), next(results), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_processes_end_where_the_builder_is_killed():
    root = Path(load.__file__).parents[1]
    script = textwrap.dedent(ORPHANS)
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        timeout=60,
    )
    numbers = {int(number) for number in done.stdout.split()}
    assert numbers
    ends = time.monotonic() + 10
    while time.monotonic() < ends and any(map(_runs, numbers)):
        time.sleep(0.1)
    assert not [number for number in numbers if _runs(number)]


def _runs(number):
    try:
        state = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


WORKER = """
    import json, sys, time
    from pathlib import Path
    from data_sources import load, source_identity
    from rlhf_app.config.schema import SourceConfig
    source_identity.LARGE_BYTES = 0
    real = load.write_records
    def write(*args):
        print("built", flush=True)
        time.sleep(0.5)
        real(*args)
    load.write_records = write
    table, _ = load.load_source(
        SourceConfig(path=sys.argv[1]), verbatim=False, max_bad_fraction=0, cache=Path(sys.argv[2])
    )
    print(len(table))
"""


@pytest.mark.slow
def test_complaint_dse558_dsc19_processes_that_start_together_read_once(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "response": "r"} for i in range(50)])
    command = [sys.executable, "-c", textwrap.dedent(WORKER), source.path, str(tmp_path / "cache")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = [line for worker in workers for line in worker.communicate()[0].split()]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert sorted(lines) == ["50", "50", "50", "built"]
