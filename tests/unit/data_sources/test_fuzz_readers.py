"""Readers under random damage: one clear error at most, and whole rows as they were."""

import gzip
import json
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_sources.load import load_source
from data_sources.raw_rows import RawRow
from data_sources.readers import read_file
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError

# The same examples each time: a failure in CI is a failure here.
bounded = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
TEXTS = ("json", "jsonl", "csv", "tsv")

# Pieces of the formats, so that random files come near to being right.
PIECES = (
    b'{"prompt": "p", "chosen": "c", "rejected": "r"}', b"[", b"]", b"{", b"}", b'"', b",", b"\n",
    b"\r\n", b"\r", b"\t", b":", b"\\u0000", b"\\ud83d", b"\0", b"\xff", b"\xef\xbb\xbf", b"NaN",
    b"1e999", b"prompt,chosen,rejected\n", b'"a","b\n"', b"\xe2\x80", b"\xd7\xa9", b"PAR1",
    b"ARROW1", b"\x1f\x8b\x08",
)  # fmt: skip
damaged = st.lists(st.sampled_from(PIECES) | st.binary(max_size=12), max_size=30).map(b"".join)
texts = st.text(max_size=20).map(lambda text: "x" + text.replace("\0", "") + "x")
# Answers do not begin with their prompt: a prompt that both repeat is taken off them.
pairs = st.builds(
    lambda p, c, r: {"prompt": "?" + p, "chosen": c, "rejected": r}, texts, texts, texts
).filter(lambda row: "Human:" not in str(row))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "text", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
odd_rows = st.dictionaries(
    st.sampled_from(["prompt", "chosen", "rejected", "system", "margin", "response"]),
    values,
    max_size=6,
)


def one_line(error):
    assert "\n" not in str(error)


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("suffix", SUFFIXES)
@bounded
@given(data=damaged)
def test_any_bytes_give_rows_or_one_line(tmp_path, suffix, packed, data):
    path = tmp_path / f"a{suffix}{packed}"
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    try:
        load_source(SourceConfig(path=str(path)), verbatim=False, max_bad_fraction=0.5)
    except ConfigError as error:
        one_line(error)


@bounded
@given(rows=st.lists(st.tuples(pairs, damaged), min_size=1, max_size=5), crlf=st.booleans())
def test_whole_lines_survive_whatever_stands_between_them(tmp_path, rows, crlf):
    end = b"\r\n" if crlf else b"\n"
    lines = [part for row, junk in rows for part in (junk, json.dumps(row).encode())]
    path = tmp_path / "a.jsonl"
    path.write_bytes(end.join(lines))
    found = [row.values for row in read_file(path) if isinstance(row, RawRow)]
    remaining = iter(found)
    assert all(row in remaining for row, _ in rows)  # in their order


plain = st.text(string.ascii_letters + "\u05e9\U0001f600 ", min_size=1, max_size=8)


@pytest.mark.parametrize("delimiter", [",", "\t"])
@bounded
@given(
    before=st.lists(st.tuples(plain, plain), max_size=4),
    junk=damaged,
    after=st.lists(st.tuples(plain, plain), max_size=4),
)
def test_plain_rows_survive_a_broken_part_of_csv(tmp_path, delimiter, before, junk, after):
    """Rows without quotes: an open quote may lawfully end in a later row's quote."""
    path = tmp_path / ("a.csv" if delimiter == "," else "a.tsv")
    write = [delimiter.join(row).encode() for row in [("a", "b"), *before]]
    rest = [delimiter.join(row).encode() for row in after]
    path.write_bytes(b"\n".join([*write, junk, *rest]))
    found = [row.values for row in read_file(path) if isinstance(row, RawRow)]
    remaining = iter(found)
    assert all({"a": a, "b": b} in remaining for a, b in [*before, *after])


@bounded
@given(good=st.lists(pairs, min_size=3, max_size=6), odd=st.lists(odd_rows, max_size=3))
def test_odd_values_leave_the_other_rows_as_they_are(tmp_path, good, odd):
    path = tmp_path / "a.jsonl"
    rows = [*odd[:1], *good, *odd[1:]]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    records, counts = load_source(
        SourceConfig(path=str(path)), verbatim=False, max_bad_fraction=1.0
    )
    made = iter([(r.messages[-1].content, r.chosen, r.rejected) for r in records])
    assert all(tuple(text.strip() for text in row.values()) in made for row in good)
    assert counts.read == len(rows) == counts.usable + counts.unusable.total()
    assert set(counts.samples) == set(counts.unusable)


@bounded
@given(rows=st.lists(pairs, min_size=1, max_size=30), share=st.floats(0, 1, exclude_max=True))
def test_a_cut_gzip_gives_a_beginning_and_then_an_error(tmp_path, rows, share):
    data = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data[: max(1, int(len(data) * share))])
    found = []
    with pytest.raises(ConfigError) as caught:
        found.extend(read_file(path))
    one_line(caught.value)
    assert [row.values for row in found] == rows[: len(found)]
