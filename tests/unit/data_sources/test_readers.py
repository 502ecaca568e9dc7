"""Files of every format, written by independent writers, read back row by row."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_sources.hub import HuggingFaceHub
from data_sources.raw_rows import BadRow, RawRow
from data_sources.readers import read_file
from data_sources.sources import read_source
from rlhf_app.errors import ConfigError

ROWS = [
    {"prompt": 'a\nb, "c"', "chosen": "é 中", "rejected": "x\t"},
    {"prompt": "d", "chosen": "", "rejected": "y"},
]
DEEP = b"[" * 100_000 + b"]" * 100_000
# A valid header, then a deflate block of a type that does not exist.
CORRUPT = gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20


def write(path, rows=ROWS):
    name = path.name.removesuffix(".gz")
    table = pa.Table.from_pylist(rows)
    if name.endswith(".json"):
        data = json.dumps(rows, ensure_ascii=False).encode()
    elif name.endswith(".jsonl"):
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    elif name.endswith((".csv", ".tsv")):
        import io

        text = io.StringIO(newline="")
        delimiter = "\t" if name.endswith(".tsv") else ","
        writer = csv.DictWriter(text, rows[0].keys(), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        data = text.getvalue().encode()
    elif name.endswith(".parquet"):
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        data = sink.getvalue().to_pybytes()
    else:
        sink = pa.BufferOutputStream()
        opener = pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
        with opener(sink, table.schema) as writer:
            writer.write_table(table)
        data = sink.getvalue().to_pybytes()
    path.write_bytes(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)
    return path


def values(rows):
    return [row.values for row in rows]


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize(
    "name", ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet", "stream.arrow", "file.arrow"]
)
def test_every_format_gives_the_same_rows(tmp_path, name, packed):
    assert values(read_file(write(tmp_path / (name + packed)))) == ROWS


def test_bad_lines_are_counted_not_fatal_and_blank_lines_are_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n[1]\n"\xff"\n{"a": 2}\n')
    rows = list(read_file(path))
    assert [(row.where, type(row)) for row in rows] == [
        ("a.jsonl line 1", RawRow),
        ("a.jsonl line 3", BadRow),
        ("a.jsonl line 4", BadRow),
        ("a.jsonl line 5", BadRow),
        ("a.jsonl line 6", RawRow),
    ]
    assert [row.reason for row in rows if isinstance(row, BadRow)] == [
        "not valid JSON",
        "not an object with columns",
        "not valid UTF-8",
    ]


def test_a_line_nested_too_deeply_is_a_bad_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": ' + DEEP + b'}\n{"a": 2}\n')
    rows = list(read_file(path))
    assert [type(row) for row in rows] == [RawRow, BadRow, RawRow]
    assert (rows[1].where, rows[1].reason) == ("a.jsonl line 2", "JSON is nested too deeply")


@pytest.mark.parametrize("path", ["", " "])
def test_an_empty_path_is_not_the_current_directory(tmp_path, monkeypatch, path):
    write(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="empty path"):
        read_source(path)


def test_csv_rows_with_other_numbers_of_fields_are_bad(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n1\n1,2,3\n4,5\n")
    rows = list(read_file(path))
    assert [type(row) for row in rows] == [RawRow, BadRow, BadRow, RawRow]
    assert rows[3].values == {"a": "4", "b": "5"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"data": [{"a": 1}, {"a": 2}]}', [{"a": 1}, {"a": 2}]),
        ('{"a": [1, 2], "b": [3, 4]}', [{"a": 1, "b": 3}, {"a": 2, "b": 4}]),
        ('{"a": 1, "b": 2}', [{"a": 1, "b": 2}]),
        ('{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
    ],
)
def test_json_may_wrap_rows_be_columns_one_row_or_lines(tmp_path, text, expected):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert values(read_file(path)) == expected


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", b"[1, ", "not valid JSON"),
        ("a.json", b'"text"', "list of rows"),
        ("a.json", b'{"a": [1], "b": [1, 2]}', "different lengths"),
        ("a.parquet", b"no", "not a Parquet file"),
        ("a.arrow", b"nonsense", "not an Arrow file"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.jsonl.gz", CORRUPT, "cannot be read"),
        ("a.csv.gz", CORRUPT, "cannot be read"),
        ("a.parquet.gz", CORRUPT, "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}' * 99, mtime=0)[:-9], "cannot be read"),
        ("a.json", DEEP, "nested too deeply"),
        ("a.csv", b"\xff,b\n1,2\n", "not UTF-8"),
        ("a.xlsx", b"", "unknown file type"),
    ],
)
def test_unreadable_files_are_one_line_errors_with_the_path(tmp_path, name, data, words):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=words) as caught:
        list(read_file(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_directories_read_the_files_of_a_split(tmp_path):
    write(tmp_path / "train-00000-of-00002.parquet", ROWS[:1])
    write(tmp_path / "train-00001-of-00002.parquet", ROWS[1:])
    write(tmp_path / "test-00000-of-00001.parquet", ROWS[1:])
    (tmp_path / "README.md").write_text("no data")
    assert values(read_source(str(tmp_path))) == ROWS
    assert values(read_source(str(tmp_path), evaluation=True)) == ROWS[1:]
    assert values(read_source(str(tmp_path), "test")) == ROWS[1:]
    with pytest.raises(ConfigError, match="has splits test, train, not dev"):
        read_source(str(tmp_path), "dev")


def test_directories_without_splits_read_everything(tmp_path):
    write(tmp_path / "b.jsonl", ROWS[1:])
    write(tmp_path / "a.csv", ROWS[:1])
    assert values(read_source(str(tmp_path))) == ROWS
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="holds no"):
        read_source(str(empty))


def test_saved_datasets(tmp_path):
    import datasets

    saved = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[1:])}
    )
    saved.save_to_disk(str(tmp_path / "both"))
    assert values(read_source(str(tmp_path / "both"))) == ROWS
    assert values(read_source(str(tmp_path / "both"), evaluation=True)) == ROWS[1:]
    with pytest.raises(ConfigError, match="splits train, test, not extra"):
        read_source(str(tmp_path / "both"), "extra")
    saved["train"].save_to_disk(str(tmp_path / "one"))
    assert values(read_source(str(tmp_path / "one"))) == ROWS


@pytest.mark.parametrize("path", ["/no/such.jsonl", "./missing", "missing.csv", "a/b/c/d"])
def test_missing_paths_are_not_looked_for_on_the_hub(path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_source(path)


def test_a_hub_id_without_network_is_one_line(monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'Dahoas/rm-static' on the Hub (LocalEntryNotFound)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigError, match="Hub cannot be reached") as caught:
        read_source("Dahoas/rm-static")
    assert "\n" not in str(caught.value)


def test_hub_ids_pass_config_and_choose_splits(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config):
        asked.append((name, config))
        return datasets.DatasetDict(
            {
                "train": datasets.Dataset.from_list(ROWS),
                "validation": datasets.Dataset.from_list(ROWS[1:]),
            }
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert values(read_source("owner/name:part")) == ROWS
    assert values(read_source("owner/name", evaluation=True)) == ROWS[1:]
    assert asked == [("owner/name", "part"), ("owner/name", None)]
    with pytest.raises(ConfigError, match="splits train, validation, not test"):
        read_source("owner/name", "test")


def test_a_stream_of_the_hub_is_read_row_by_row(monkeypatch):
    import datasets

    read = []

    def rows():
        for row in ROWS:
            read.append(row)
            yield row

    def load_dataset(name, config, *, streaming):
        assert streaming
        return datasets.IterableDatasetDict(
            {"train": datasets.IterableDataset.from_generator(rows)}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = read_source("owner/name", hub=HuggingFaceHub(streaming=True))
    assert next(found).values == ROWS[0]
    assert len(read) < len(ROWS)
    assert [row.values for row in found] == ROWS[1:]
