"""Places of data: patterns, compressed files, addresses, saved datasets, columns, normalisers."""

import gzip
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import fsspec
import pytest
import yaml

from data_sources import compressed
from data_sources.load import load_source
from data_sources.records import Message
from data_sources.sources import read_source
from rlhf_app.config.schema import SourceConfig, parse_source
from rlhf_app.data_paths import source_hash
from rlhf_app.errors import ConfigError

ROWS = [
    {"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(6)
]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def numbers(rows):
    return [int(row.values["prompt"].split()[-1]) for row in rows]


def zstd(data):
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor().compress(data)


def load(path, **source):
    return load_source(SourceConfig(path=str(path), **source), verbatim=False, max_bad_fraction=0.5)


@pytest.fixture
def bucket():
    """A directory of the file system that fsspec keeps in memory."""
    files = fsspec.filesystem("memory")
    files.mkdirs("/bucket", exist_ok=True)
    yield files
    files.rm("/bucket", recursive=True)


# Patterns


def test_a_pattern_takes_the_files_that_match_in_order(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[2:4]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[:2])))
    (tmp_path / "a.txt").write_text("no data")
    deep = tmp_path / "deep" / "er"
    deep.mkdir(parents=True)
    (deep / "c.jsonl").write_bytes(lines(ROWS[4:]))
    assert numbers(read_source(f"{tmp_path}/*.jsonl*")) == [0, 1, 2, 3]
    assert numbers(read_source(f"{tmp_path}/[b].jsonl")) == [2, 3]
    assert numbers(read_source(f"{tmp_path}/**/*.jsonl")) == [2, 3, 4, 5]
    for pattern in ("*.csv", "*.txt"):
        with pytest.raises(ConfigError, match=r"holds no \.json"):
            read_source(f"{tmp_path}/{pattern}")


def test_a_file_may_be_called_like_a_pattern(tmp_path):
    (tmp_path / "a[1].jsonl").write_bytes(lines(ROWS[:1]))
    (tmp_path / "a1.jsonl").write_bytes(lines(ROWS[1:]))
    assert numbers(read_source(f"{tmp_path}/a[1].jsonl")) == [0]


def test_a_pattern_never_mixes_splits(tmp_path):
    (tmp_path / "train-0.jsonl").write_bytes(lines(ROWS[:2]))
    (tmp_path / "train-1.jsonl").write_bytes(lines(ROWS[2:4]))
    (tmp_path / "test-0.jsonl").write_bytes(lines(ROWS[4:]))
    assert numbers(read_source(f"{tmp_path}/*.jsonl")) == [0, 1, 2, 3]
    assert numbers(read_source(f"{tmp_path}/*.jsonl", evaluation=True)) == [4, 5]
    # Files of one split were chosen by the user, whatever for.
    assert numbers(read_source(f"{tmp_path}/train-*.jsonl", evaluation=True)) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="splits test, train, not dev"):
        read_source(f"{tmp_path}/*.jsonl", "dev")


def test_the_content_of_a_pattern_counts(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:1]))
    pattern = f"{tmp_path}/*.jsonl"
    first = source_hash(pattern)
    assert source_hash(pattern) == first
    (tmp_path / "other.txt").write_text("not matched")
    assert source_hash(pattern) == first
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[1:]))
    second = source_hash(pattern)
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[2:]))
    assert len({first, second, source_hash(pattern)}) == 3


# Zstandard


@pytest.mark.parametrize("frames", [1, 3])
def test_zstandard_frames_are_read_to_their_end(tmp_path, frames):
    each = len(ROWS) // frames
    data = b"".join(zstd(lines(ROWS[i * each : (i + 1) * each])) for i in range(frames))
    (tmp_path / "a.jsonl.zst").write_bytes(data)
    assert numbers(read_source(str(tmp_path / "a.jsonl.zst"))) == [0, 1, 2, 3, 4, 5]
    assert numbers(read_source(str(tmp_path))) == [0, 1, 2, 3, 4, 5]


def test_blocks_larger_than_the_buffers(tmp_path):
    rows = [{"prompt": f"{'long ' * 1000} {i}"} for i in range(3000)]  # 15 MB
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(lines(rows)))
    assert numbers(read_source(str(tmp_path / "a.jsonl.zst"))) == list(range(3000))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-5], "ends in the middle"),
        (lambda data: data + data[:20], "ends in the middle"),
        (lambda data: b"no zstd" * 9, "damaged Zstandard"),
    ],
)
def test_cut_and_damaged_zstandard_is_an_error_with_the_path(tmp_path, change, words):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(change(zstd(lines(ROWS))))
    with pytest.raises(ConfigError, match=words) as caught:
        list(read_source(str(path)))
    assert str(path) in str(caught.value)


def test_without_the_package_zstandard_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstd(lines(ROWS)))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlhf\[zst\]'"):
        list(read_source(str(path)))


def test_suffixes():
    assert compressed.plain_name("A.JSONL.ZST") == "a.jsonl"
    assert compressed.plain_name("a.csv.gz") == "a.csv"


# Addresses


def test_files_directories_and_patterns_at_an_address(bucket):
    bucket.pipe("/bucket/train-0.jsonl", lines(ROWS[:2]))
    bucket.pipe("/bucket/deep/train-1.jsonl.gz", gzip.compress(lines(ROWS[2:4])))
    bucket.pipe("/bucket/test.jsonl", lines(ROWS[4:]))
    bucket.pipe("/bucket/README.md", b"no data")
    assert numbers(read_source("memory://bucket/test.jsonl")) == [4, 5]
    assert sorted(numbers(read_source("memory://bucket"))) == [0, 1, 2, 3]
    assert numbers(read_source("memory://bucket", evaluation=True)) == [4, 5]
    assert numbers(read_source("memory://bucket/train-*.jsonl")) == [0, 1]
    assert numbers(read_source("memory://bucket/**/*.gz")) == [2, 3]
    records, counts = load("memory://bucket/test.jsonl")
    assert (records[0].source, counts.path) == ("test.jsonl", "memory://bucket/test.jsonl")


def test_parquet_and_saved_datasets_at_an_address(bucket, tmp_path):
    saved = datasets.Dataset.from_list(ROWS)
    saved.to_parquet(tmp_path / "a.parquet")
    bucket.put(str(tmp_path / "a.parquet"), "/bucket/a.parquet")
    assert numbers(read_source("memory://bucket/a.parquet")) == [0, 1, 2, 3, 4, 5]
    datasets.DatasetDict({"train": saved, "test": saved.select([5])}).save_to_disk(
        str(tmp_path / "saved")
    )
    bucket.put(str(tmp_path / "saved"), "/bucket/saved", recursive=True)
    assert numbers(read_source("memory://bucket/saved")) == [0, 1, 2, 3, 4, 5]
    assert numbers(read_source("memory://bucket/saved", evaluation=True)) == [5]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://bucket/none.jsonl", "cannot be read"),
        ("memory://bucket/*.jsonl", "holds no .json"),
        ("nonsense://bucket/a.jsonl", "nonsense"),
        ("abfs://container/a.jsonl", "adlfs"),
    ],
)
def test_addresses_that_give_nothing_are_one_line_errors(bucket, url, words):
    with pytest.raises(ConfigError, match=words) as caught:
        list(read_source(url))
    assert url in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def web(tmp_path):
    """A web server whose files are asked for with a signature; one breaks off in the middle."""
    files = {
        "/a.jsonl": lines(ROWS),
        "/b.parquet": pq_bytes(tmp_path),
        "/broken.jsonl": lines(ROWS),
    }

    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path, _, query = self.path.partition("?")
            if path == "/private.jsonl":
                self.send_response(302)
                self.send_header("Location", "/a.jsonl?sig=a*b[c]")
                self.end_headers()
                seen.append(self.headers["Authorization"])
                return
            seen.append(self.headers["Authorization"])
            if path not in files or query != "sig=a*b[c]":
                self.send_error(404)
                return
            data = files[path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(data) + 10 * (path == "/broken.jsonl")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


def pq_bytes(directory):
    datasets.Dataset.from_list(ROWS).to_parquet(directory / "b.parquet")
    return (directory / "b.parquet").read_bytes()


def test_web_addresses_are_files_whatever_is_in_their_query(web):
    web, _ = web
    for name in ("a.jsonl", "b.parquet"):
        assert numbers(read_source(f"{web}/{name}?sig=a*b[c]")) == [0, 1, 2, 3, 4, 5]
    for name, reason in (("none.jsonl", "cannot be read"), ("broken.jsonl", "cannot be read")):
        with pytest.raises(ConfigError, match=rf"{name}\?\*\*\* {reason}") as caught:
            list(read_source(f"{web}/{name}?sig=a*b[c]"))
        assert "a*b" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_login_is_for_the_host_that_it_was_given_for(web):
    web, seen = web
    address = web.replace("http://", "http://us%65r:pass@") + "/private.jsonl"
    assert numbers(read_source(address)) == [0, 1, 2, 3, 4, 5]
    assert seen == ["Basic dXNlcjpwYXNz", None]  # base64 of user:pass


def test_secrets_of_an_address_are_not_shown():
    url = "https://user:secret@127.0.0.1:9/a.jsonl?token=secret"
    assert source_hash(url) == "hub:https://***@127.0.0.1:9/a.jsonl?***"
    with pytest.raises(ConfigError) as caught:
        load(url)
    assert "secret" not in str(caught.value)
    assert "127.0.0.1:9/a.jsonl" in str(caught.value)


def test_an_equals_sign_in_an_address_is_no_weight():
    assert parse_source("https://host/a.jsonl?version=3") == {
        "path": "https://host/a.jsonl?version=3"
    }
    assert parse_source("s3://bucket/a.jsonl=0.5") == {"path": "s3://bucket/a.jsonl", "weight": 0.5}
    SourceConfig(path="https://host/a.jsonl?signature=" + "x" * 5000)


# Columns


def test_nested_columns_by_dots(tmp_path):
    rows = [
        {
            "question": {"text": "q", "id": 1},
            "answers": [{"body": "good"}, {"body": "bad"}],
            "a.b": "with a dot",
        }
    ]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    nested = {"prompt": "question.text", "chosen": "answers.0.body", "rejected": "answers.1.body"}
    (record,), _ = load(tmp_path / "a.jsonl", columns=nested)
    assert record.messages == (Message("user", "q"),)
    assert (record.chosen, record.rejected) == ("good", "bad")
    (record,), _ = load(tmp_path / "a.jsonl", columns={**nested, "rejected": "a.b"})
    assert record.rejected == "with a dot"
    with pytest.raises(ConfigError, match=r"names 'question.txt' for prompt.*question\.text"):
        load(tmp_path / "a.jsonl", columns={**nested, "prompt": "question.txt"})


def test_a_mapped_column_is_the_only_candidate(tmp_path):
    rows = [{"prompt": "a", "question": "b", "text": "c", "answer": "d"}]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    with pytest.raises(ConfigError, match="prompt and question could each"):
        load(tmp_path / "a.jsonl")
    for name, expected in (("prompt", "a"), ("question", "b"), ("text", "c")):
        (record,), _ = load(tmp_path / "a.jsonl", columns={"prompt": name})
        assert (record.messages, record.response) == ((Message("user", expected),), "d")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "first", "question": "b", "answer": "d"},
        {"question: x": "first", "an answer": "d"},
        {"ticket": {"question": "first", "id": 1}, "answr": "d", "n": 3},
        {"promt": "first", "chosen_text": "good", "text_rejected": "bad"},
    ],
)
def test_the_line_of_an_error_is_yaml_that_mends_it(tmp_path, row):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([row]))
    with pytest.raises(ConfigError) as caught:
        load(path)
    line = re.search(r"data: \{sources: .*\}\]\}", str(caught.value))
    assert line is not None
    (source,) = yaml.safe_load(line[0])["data"]["sources"]
    (record,), _ = load_source(SourceConfig(**source), verbatim=False, max_bad_fraction=0)
    assert record.messages == (Message("user", "first"),)


def test_rows_without_a_nested_column_are_counted(tmp_path):
    rows = [{"q": {"text": "a"}, "response": "r"}] * 3 + [{"q": None, "response": "r"}]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    records, counts = load(tmp_path / "a.jsonl", columns={"prompt": "q.text"})
    assert (len(records), counts.unusable) == (3, {"prompt is missing": 1})


# Normalisers

NORMALISER = """
def to_record(row):
    if row["kind"] == "skip":
        return None
    if row["kind"] == "fail":
        raise KeyError("kind")
    if row["kind"] == "odd":
        return {"prompt": row["q"], "answer": "x"}
    if row["kind"] == "text":
        return "text"
    if row["kind"] == "half":
        return {"prompt": row["q"], "chosen": "x"}
    if row["kind"] == "pair":
        return {"prompt": row["q"], "chosen": "yes", "rejected": "no", "margin": 0.5}
    if row["kind"] == "two":
        turns = [{"role": "user", "content": row["q"]}]
        return [{"messages": turns, "response": "one"}, {"prompt": row["q"], "system": "s"}]
    return {"messages": [{"role": "user", "content": row["q"]},
                         {"role": "assistant", "content": "hello"}]}
"""


def test_a_normaliser_that_leaves_the_program_or_the_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends.py").write_text(
        "import os, sys\n"
        "def f(row):\n"
        "    os.chdir('/')\n"
        "    return {'prompt': row['q']} if row['q'] else sys.exit(3)\n"
    )
    (tmp_path / "a.jsonl").write_bytes(lines([{"q": ""}, {"q": "what"}]))
    source = SourceConfig(path="a.jsonl", normaliser="ends.py:f")
    records, counts = load_source(source, verbatim=False, max_bad_fraction=0.5)
    assert [r.messages for r in records] == [(Message("user", "what"),)]
    assert counts.unusable == {"the normaliser failed": 1}
    assert Path.cwd() == tmp_path


def test_a_normaliser_makes_records_of_any_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rows.py").write_text(NORMALISER)
    kinds = ["pair", "two", "talk", "skip", "fail", "odd", "text", "half"]
    rows = [{"kind": kind, "q": f"q {kind}", "other": 1} for kind in kinds]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    source = SourceConfig(path="a.jsonl", normaliser="my_rows.py:to_record")
    records, counts = load_source(source, verbatim=False, max_bad_fraction=0.5)
    user = [(Message("user", f"q {kind}"),) for kind in ("pair", "two", "two", "talk")]
    user[2] = (Message("system", "s"), *user[2])
    assert [r.messages for r in records] == user
    assert [r.response for r in records] == [None, "one", None, "hello"]
    assert [(r.chosen, r.rejected, r.margin) for r in records[:1]] == [("yes", "no", 0.5)]
    assert counts.unusable == {
        "left out by the normaliser": 1,
        "the normaliser failed": 1,
        "the normaliser's record has unknown keys": 1,
        "the normaliser's record is not a dict": 1,
        "the normaliser's record has chosen without its counterpart": 1,
    }
    assert "KeyError" in counts.samples["the normaliser failed"][0]
    assert counts.shape == "normaliser my_rows.py:to_record"
    # As a module of the current directory; what it leaves out is no fault of the rows.
    (tmp_path / "my_rows.py").rename(tmp_path / "rows_of_kinds.py")
    (tmp_path / "b.jsonl").write_bytes(lines([rows[0], *[rows[3]] * 9]))
    source = SourceConfig(path="b.jsonl", normaliser="rows_of_kinds:to_record")
    records, counts = load_source(source, verbatim=False, max_bad_fraction=0.0)
    assert (len(records), counts.usable) == (1, 1)
    monkeypatch.delitem(sys.modules, "rows_of_kinds")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nonsense", "expected module:function"),
        ("no_such_module_here:f", "no module no_such_module_here"),
        ("missing.py:f", "no file missing.py"),
    ],
)
def test_normalisers_that_are_not_there(tmp_path, spec, words):
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    with pytest.raises(ConfigError, match=f"normaliser {spec}.*{words}"):
        load(tmp_path / "a.jsonl", normaliser=spec)


def test_a_local_copy_of_a_known_dataset(tmp_path):
    rows = [
        {"prompt": "q", "response": text, "helpfulness": score}
        for text, score in (("bad", 1), ("good", 4))
    ]
    (tmp_path / "train.jsonl").write_bytes(lines(rows))
    (record,), _ = load(tmp_path, normaliser="nvidia/HelpSteer2")
    assert (record.chosen, record.rejected) == ("good", "bad")
