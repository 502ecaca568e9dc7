"""Files that were put together or written by other programs: nothing of them is misread."""

from __future__ import annotations

import json

import pytest

from data_sources.fields import RowError, answer_of, optional_text, text_of
from data_sources.load import load_source
from data_sources.raw_rows import BadRow, RawRow
from data_sources.readers import read_file
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError

BOM = b"\xef\xbb\xbf"
HEADER = ["prompt", "chosen", "rejected"]


def table(separator: str, rows: list[list[str]]) -> bytes:
    return "".join(separator.join(row) + "\r\n" for row in rows).encode()


def outcome(path):
    """Values of each row, or the reason why there are none."""
    return [
        list(row.values.values()) if isinstance(row, RawRow) else row.reason
        for row in read_file(path)
    ]


@pytest.mark.parametrize("mark", [BOM, b""])
@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables_put_together_give_their_rows_alone(tmp_path, name, separator, mark):
    one = [HEADER, ["q1", "a", "b"], ["q2", '"x\r\n\ufeffy"', "b"]]
    two = [[f'"{column}"' for column in HEADER], ["q3", "a", "b"]]
    path = tmp_path / name
    path.write_bytes(mark.join([b"", table(separator, one), table(separator, two)]))
    again = "the header once more"
    # Within a text the mark is text.
    expected = [["q1", "a", "b"], ["q2", "x\r\n\ufeffy", "b"], again, ["q3", "a", "b"]]
    assert outcome(path) == expected
    records, counts = load_source(SourceConfig(path=str(path)), verbatim=True, max_bad_fraction=0.5)
    assert [record.messages[0].content for record in records] == ["q1", "q2", "q3"]
    assert dict(counts.unusable) == {again: 1}


def test_a_mark_before_a_row_that_follows_a_broken_one_is_skipped(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'p,r\r\n"open,1\r\n' + BOM + b"2,b\r\n" + BOM + b"3,c\r\n")
    assert outcome(path) == ["not valid CSV", ["2", "b"], ["3", "c"]]


def test_tables_of_another_order_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        table(",", [HEADER, ["q", "a", "b"], ["prompt", "rejected", "chosen"], ["q", "b", "a"]])
    )
    with pytest.raises(ConfigError, match=r"a.csv row 2 is a header .* another order"):
        outcome(path)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "Infinity"])
def test_infinity_is_no_text(number):
    row = json.loads(f'{{"a": {number}}}')
    for read in (text_of, answer_of, optional_text):
        with pytest.raises(RowError, match=r"a is not text: -?inf"):
            read(row, "a")
    assert text_of({"a": 1.5e300}, "a") == "1.5e+300"


TWICE = '{"prompt": "p", "response": "a", "response": "b"}'
ONCE = '{"prompt": "p", "response": "c", "extra": {"x": 1, "x": 2}}'


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", f"{TWICE}\n{ONCE}\n"), ("a.json", f"[{TWICE}, {ONCE}]")],
)
def test_a_row_with_a_column_twice_is_a_bad_one(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert outcome(path) == ["a column is there twice", ["p", "c", {"x": 2}]]


def test_a_document_with_a_name_twice_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(f'{{"data": [{ONCE}], "data": [{ONCE}]}}')
    with pytest.raises(ConfigError, match=r"a.json: a name is there twice"):
        outcome(path)


@pytest.mark.parametrize("form", ["UTF-16LE", "UTF-16BE"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"prompt": "p", "response": "r"}\n'),
        ("a.json", ' [\n {"prompt": "p"}]'),
        ("a.csv", "p,r\n1,2\n"),
    ],
)
def test_utf16_without_a_mark_is_named(tmp_path, name, text, form):
    path = tmp_path / name
    path.write_bytes(text.encode(form))
    with pytest.raises(ConfigError, match=rf"is {form}; convert it: iconv -f {form} -t UTF-8"):
        outcome(path)


def test_a_crash_that_left_zeros_at_the_start_is_one_bad_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\0{"prompt": "p"}\n' + b"\0" * 99 + b'\n{\0"prompt": "p"}\n{"p": "q"}\n')
    assert outcome(path) == ["null bytes", "null bytes", "null bytes", ["q"]]


def test_a_number_too_long_names_no_function_of_python(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"p": ' + "9" * 5000 + "}\n")
    (row,) = read_file(path)
    assert isinstance(row, BadRow)
    assert (row.reason, "5000 digits" in row.detail, "sys." in row.detail) == (
        *("not valid JSON", True),
        False,
    )
    (tmp_path / "a.json").write_text('[{"p": ' + "9" * 5000 + "}]\n")
    with pytest.raises(ConfigError, match=r"5000 digits$"):
        outcome(tmp_path / "a.json")


def test_rows_as_deep_as_json_reads_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    deep = '{"p": "q", "unused": ' + '{"a": ' * 900 + "1" + "}" * 900 + "}\n"
    path.write_text(deep + deep.replace('{"a": ' * 900, '{"a": ' * 9000))
    found = list(read_file(path))
    assert [type(row) for row in found] == [RawRow, BadRow]
    assert found[0].values["p"] == "q"
