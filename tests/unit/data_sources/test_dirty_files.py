"""Dirty files: what is broken is counted by its reason, and what is whole stays as it is."""

import csv
import gzip
import io
import json

import pytest

from data_sources.load import load_source
from data_sources.raw_rows import BadRow, RawRow
from data_sources.readers import read_file
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError

BOM = b"\xef\xbb\xbf"
RTL = "\u05e9\u05dc\u05d5\u05dd \u202e\u0645\u0631\u062d\u0628\u0627"
EMOJI = "\U0001f469\u200d\U0001f4bb \U0001f600\ufe0f"
LONG = "word " * 20_000


def pair(prompt="p", chosen="c", rejected="r"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


GOOD = [pair(), pair(RTL, EMOJI), pair("q", LONG, "short"), pair("caf\u00e9", "e\u0301"), pair()]


def line(row, **options):
    return json.dumps(row, **options).encode()


# What a line holds, and the reason by which it is counted.
BROKEN = [
    (line({"prompt": "p", "chosen": "c"}), "rejected is missing"),
    (line(pair(chosen=None)), "chosen is missing"),
    (line(pair(chosen=["c"])), "chosen is not text"),
    (line(pair(chosen=True)), "chosen is not text"),
    (line(pair(prompt="")), "prompt is empty"),
    (line(pair(rejected=" \n")), "rejected is empty"),
    (line(pair(chosen="a\0b")), "chosen holds a null byte"),
    (b'{"prompt": "a\0b", "chosen": "c", "rejected": "r"}', "null bytes"),
    (b"\0" * 4096, "null bytes"),
    (line(pair("caf\u00e9"), ensure_ascii=False).decode().encode("latin-1"), "not valid UTF-8"),
    (line(pair())[:20], "not valid JSON"),
    (b"[1, 2]", "not an object with columns"),
    (b"null", "not an object with columns"),
]


def load(path, limit=1.0):
    return load_source(SourceConfig(path=str(path)), verbatim=False, max_bad_fraction=limit)


def texts(records):
    return [(r.messages[-1].content, r.chosen, r.rejected) for r in records]


def expected(rows):
    return [(r["prompt"], r["chosen"].strip(), r["rejected"].strip()) for r in rows]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_a_dirty_file_of_lines(tmp_path, name, end):
    lines = [BOM + line(GOOD[0]), b""]
    for number, (broken, _) in enumerate(BROKEN):
        good = GOOD[number % len(GOOD)]
        lines += [broken, line(good, ensure_ascii=number % 2 == 0), b"  "]
    lines += [BOM + line(GOOD[1])]  # a second file put behind the first
    data = end.join(lines)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    records, counts = load(path)
    kept = [GOOD[0], *(GOOD[i % len(GOOD)] for i in range(len(BROKEN))), GOOD[1]]
    assert texts(records) == expected(kept)
    reasons = [reason for _, reason in BROKEN]
    assert dict(counts.unusable) == {reason: reasons.count(reason) for reason in reasons}
    # The examples say where: line 3 is the first broken one, then every third.
    for reason in set(reasons):
        numbers = [3 + 3 * i for i, other in enumerate(reasons) if other == reason]
        assert [s.split(":")[0] for s in counts.samples[reason]] == [
            f"{name} line {number}" for number in numbers
        ]


def test_the_threshold_names_the_file_the_reasons_and_the_first_rows(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [pair(f"p{i}") for i in range(8)] + [pair(chosen=""), {"prompt": "p", "chosen": "c"}]
    path.write_bytes(b"\n".join(map(line, rows)) + b"\n" + line(pair(chosen="")))
    assert len(load(path, limit=3 / 11)[0]) == 8  # just as many as may be
    with pytest.raises(ConfigError) as caught:
        load(path, limit=0.25)
    message = str(caught.value)
    assert f"data source {path} (read as prompt + chosen + rejected): 3 of 11 rows" in message
    assert "chosen is empty (2: mine.jsonl line 9, mine.jsonl line 11)" in message
    assert "rejected is missing (1: mine.jsonl line 10)" in message
    assert "raise data.max_bad_fraction (0.25)" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_one_row_is_a_file(tmp_path, name):
    path = tmp_path / name
    delimiter = "\t" if name == "a.tsv" else ","
    if "json" in name:
        path.write_bytes(line(pair()))
    else:
        path.write_text(delimiter.join(pair()) + "\n" + delimiter.join(pair().values()))
    assert texts(load(path)[0]) == [("p", "c", "r")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize("data", [b"", b"\n\n", BOM])
def test_an_empty_file_is_one_clear_line(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"holds no rows|not valid JSON") as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_is_named(tmp_path, name, encoding):
    path = tmp_path / name
    path.write_bytes("\ufeff".encode(encoding)[:2] + "\n".join(["a,b", "c,d"]).encode(encoding))
    with pytest.raises(ConfigError, match=r"UTF-16|not UTF-8"):
        load(path)


def test_bytes_that_are_no_text_spoil_their_own_row_only(tmp_path):
    """In a list of rows and in CSV, whose readers see the whole file as one text."""
    listed = tmp_path / "a.json"
    listed.write_bytes(b'[{"a": "x"}, {"a": "\xe9"}, {"a": "\xc3\xa9"}, {"a": "\\ud83d"}]')
    rows = list(read_file(listed))
    assert [row.values for row in (rows[0], rows[2])] == [{"a": "x"}, {"a": "\u00e9"}]
    assert rows[1] == BadRow("a.json row 2", "not valid UTF-8", "")
    delimited = tmp_path / "a.csv"
    delimited.write_bytes(b'a,b\r\nx,\xe9\r\n\xc3\xa9,"y\r\nz"\r\n')
    assert list(read_file(delimited)) == [
        BadRow("a.csv row 1", "not valid UTF-8", ""),
        RawRow("a.csv row 2", {"a": "\u00e9", "b": "y\r\nz"}),
    ]


def test_an_open_quote_does_not_swallow_the_rows_behind_it(tmp_path):
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerows([["a", "b"], ["1", 'say "hi"\nthere'], ["2", "x"]])
    path = tmp_path / "a.csv"
    path.write_text(text.getvalue() + '3,"open\r\n4,y\r\n5,z\r\n', newline="")
    rows = list(read_file(path))
    assert [row.values for row in rows if isinstance(row, RawRow)] == [
        {"a": "1", "b": 'say "hi"\nthere'},
        {"a": "2", "b": "x"},
        {"a": "4", "b": "y"},
        {"a": "5", "b": "z"},
    ]
    assert [(row.where, row.reason) for row in rows if isinstance(row, BadRow)] == [
        ("a.csv row 3", "not valid CSV")
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_text_columns_that_hold_no_text(tmp_path, name):
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.array([b"one", b"\xff", "z\u00e9".encode()]).view(pa.string())
    table = pa.table({"a": values})
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    rows = list(read_file(path))
    assert [row.values for row in (rows[0], rows[2])] == [{"a": "one"}, {"a": "z\u00e9"}]
    assert (rows[1].where, rows[1].reason) == (f"{name} row 2", "not valid UTF-8")


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_file_cut_short_says_how_far_it_goes(tmp_path, suffix):
    """Its lost rows cannot be counted, so no threshold lets it pass."""
    body = [f"{i},{i * 7919}" if suffix == "csv" else f'{{"a": {i * 7919}}}' for i in range(9000)]
    data = gzip.compress("\n".join(["a,b", *body] if suffix == "csv" else body).encode())
    path = tmp_path / f"a.{suffix}.gz"
    path.write_bytes(data[: len(data) // 2])
    rows = []
    with pytest.raises(ConfigError, match="copy or download it again") as caught:
        rows.extend(read_file(path))
    assert f"{path} cannot be read beyond row " in str(caught.value)


def test_duplicates_stay_and_identical_pairs_are_left_to_their_stage(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([line(pair()), line(pair()), line(pair(rejected="c"))]))
    records, counts = load(path)
    assert len(records) == 3
    assert not counts.unusable
    assert records[0].uid == records[1].uid != records[2].uid
