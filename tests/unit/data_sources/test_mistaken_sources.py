"""What users get wrong about a source is named, with what mends it; and the exit code is 2."""

import gzip
import json
import re

import pyarrow as pa
import pytest

from data_sources.load import load_source
from data_sources.records import Message
from data_sources.suggested_columns import PLACEHOLDER, suggested_columns
from rlhf_app.cli import run
from rlhf_app.config.column_names import ALIASES, unknown_names
from rlhf_app.config.load import load_given
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError

PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def pairs(number):
    return [{**PAIR, "prompt": f"p{i}"} for i in range(number)]


def load(path, **settings):
    source = SourceConfig(path=str(path), **settings)
    return load_source(source, verbatim=False, max_bad_fraction=0.1)


def refused(path, **settings):
    with pytest.raises(ConfigError) as caught:
        load(path, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def rlhf(tmp_path, monkeypatch, capsys):
    """Runs `rlhf data ...` in a directory with `a.jsonl`; returns (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "a.jsonl").write_text(lines(pairs(200)))

    def call(*arguments):
        code = run(["data", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


# Columns


@pytest.mark.parametrize(
    ("name", "meant"),
    [("promt", "prompt"), ("Chosen", "chosen"), ("positive_pasages", "positive_")],
)
def test_a_misspelt_name_of_ours_is_refused_with_the_one_meant(name, meant):
    with pytest.raises(ValueError, match=f"'{name}' is none of ours; did you mean {meant}"):
        SourceConfig(path="a.jsonl", columns={name: "x"})
    # Whatever a normaliser reads is its own affair.
    assert SourceConfig(path="a.jsonl", columns={name: "x"}, normaliser="m:f").columns


def test_every_name_that_is_recognised_may_be_mapped_to():
    assert unknown_names([*ALIASES, "better_response_id", "margin", "score_j", "text"]) == ""
    assert "ours are prompt, response" in unknown_names(["xyzzy"])


def test_the_page_lists_them(repo_root):
    text = (repo_root / "docs" / "data.md").read_text(encoding="utf-8")
    table = text.partition("| ours |")[2].partition("\n\n")[0]
    words = set(re.findall(r"\w+", table))
    assert words >= {name for names in ALIASES.values() for name in names}


@pytest.mark.parametrize(
    ("candidates", "suggested"),
    [
        (["promt", "chosen", "rejected"], ["promt", "chosen", "rejected"]),
        (
            ["rejected_text", "my_chosen", "user question"],
            ["user question", "my_chosen", "rejected_text"],
        ),
        (["title", "language"], [PLACEHOLDER, PLACEHOLDER]),
        (["ticket.question", "ticket.user"], ["ticket.question", PLACEHOLDER]),
        (["the_answer", "q"], [PLACEHOLDER, "the_answer"]),
    ],
)
def test_columns_are_suggested_by_their_names_and_never_by_their_place(candidates, suggested):
    assert list(suggested_columns(candidates).values()) == suggested


def test_passages_may_be_texts_and_have_short_names(tmp_path):
    row = {"query": "q", "pos": ["good", "x"], "neg": ["bad"]}
    (tmp_path / "a.jsonl").write_text(lines([row]))
    (record,), counts = load(tmp_path / "a.jsonl")
    assert (record.messages, record.chosen, record.rejected) == (
        (Message("user", "q"),),
        "good",
        "bad",
    )
    assert (counts.shape, counts.unused) == ("question + passages", [])
    others = [{"query": "q", "p": "good", "n": {"text": "bad"}}, {"query": "q", "p": 1.5, "n": []}]
    (tmp_path / "b.jsonl").write_text(lines([others[0]] * 19 + [others[1]]))
    columns = {"positive_passages": "p", "negative_passages": "n"}
    records, counts = load(tmp_path / "b.jsonl", columns=columns)
    assert {record.rejected for record in records} == {"bad"}
    assert counts.unusable == {"negative_passages is empty": 1}


def test_columns_that_play_no_part_are_named(tmp_path, rlhf):
    rows = [
        {"prompt": f"q{i}", "good one": ["a"], "margin": 1, "nested": {"a": "x"}} for i in range(60)
    ]
    (tmp_path / "b.jsonl").write_text(lines(rows))
    _, counts = load(tmp_path / "b.jsonl")
    assert counts.unused == ["good one", "nested"]
    _, counts = load(tmp_path / "b.jsonl", columns={"response": "nested.a"})
    assert counts.unused == ["good one"]
    code, out, _ = rlhf("stats", "--data", "b.jsonl", "--json", "--data-split", "shared")
    assert code == 0
    assert json.loads(out)["sources"][0]["columns_not_used"] == ["good one", "nested"]


# Files


def test_columns_that_are_there_twice(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected,rejected,,\np,c,r,s,,\n")
    assert "column 'rejected' is there 2 times" in refused(tmp_path / "a.csv")
    batch = pa.record_batch([["p"], ["a"], ["b"]], names=["prompt", "answer", "answer"])
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), batch.schema) as file:
        file.write_batch(batch)
    assert "column 'answer' is there 2 times" in refused(tmp_path / "a.arrow")
    # Those without a name are what a spreadsheet leaves at the end of its lines.
    (tmp_path / "a.csv").write_text("prompt,response,,\np,a,,\n")
    assert load(tmp_path / "a.csv")[0][0].response == "a"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "prompt;chosen;rejected\np;c;r\n", "separated by semicolons"),
        ("a.csv", "prompt\tanswer\np\ta\n", "separated by tabs.* name it .tsv"),
        ("a.tsv", "prompt,answer\np,a\n", "separated by commas.* name it .csv"),
    ],
)
def test_another_separator(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    assert re.search(words, refused(tmp_path / name))


def test_a_file_without_a_header(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_text("".join(f"p{i},c{i},r{i}\n" for i in range(20)))
    assert "its first line looks like a row" in refused(path)
    _, counts = load(path, columns={"prompt": "p0", "chosen": "c0", "rejected": "r0"})
    assert counts.looks == ["its first line looks like a row, not like a header"]
    assert "its first row is lost" in caplog.text
    path.write_text("Why is ice slippery?,Its surface is almost liquid.\nWhy?,Because.\n")
    assert "its first line looks like a row" in refused(path)
    # Numbered columns, and questions of a form beside columns that are none.
    path.write_text("question,answer_0,answer_1,score_0,score_1\nq,a,b,1,2\n")
    assert load(path)[1].looks == []
    path.write_text("question,Is it good?\nq,yes\n")
    assert "first line" not in " ".join(load(path)[1].looks)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.csv", "prompt,response\np,a\n".encode("utf-16"), "is UTF-16; convert it: iconv"),
        (
            "a.csv",
            "prompt,response\np,a\n".encode("utf-16-le"),
            "is UTF-16LE; convert it: iconv -f UTF-16LE",
        ),
        ("a.csv", "prömpt,response\n".encode("latin-1"), "convert it: iconv -f WINDOWS-1252"),
        ("a.parquet", b"PAR1", "copy or download it again"),
        ("a.arrow", b"nonsense", "copy or download it again"),
        ("a.jsonl.gz", b"{}", "no gzip file; leave .gz out of its name"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "p"}', mtime=0)[:12],
            "first row on: copy or download",
        ),
        ("a.json", b"3", "holds one value of type int"),
        (
            "a.json",
            b'{"v": 1, "train": [{"prompt": "p"}], "test": [{"prompt": "q"}]}',
            "each into a",
        ),
        (
            "a.json",
            b'{"v": 1, "items": [{"prompt": "p"}, {"prompt": "q"}]}',
            "if the rows are in items",
        ),
        ("a.txt", b"", "does not exist|unknown file type"),
    ],
)
def test_files_that_are_not_what_they_are_called(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    assert re.search(words, refused(tmp_path / name))


def test_addresses_name_the_package_to_install(monkeypatch):
    def missing(_):
        raise ImportError("no module")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    assert "pip install s3fs" in refused("s3://bucket/a.jsonl")
    assert "pip install gcsfs" in refused("gs://bucket/a.jsonl")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_ids": [10**12]}, "prompt_ids are no token ids"),
        ({"prompt_ids": [-1]}, "prompt_ids are no token ids"),
        ({"tokenizer": "\ud800"}, "tokenizer is not valid Unicode"),
    ],
)
def test_sampled_rows_that_no_tokenizer_made(tmp_path, monkeypatch, change, reason):
    """In memory and in files, where ids are 32 bits wide."""
    row = {"prompt": "p", "rendered": True, "tokenizer": "t", "prompt_ids": [1]}
    (tmp_path / "a.jsonl").write_text(lines([{**row, "prompt": f"p{i}"} for i in range(20)]))
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps({**row, **change}) + "\n")
    assert load(tmp_path / "a.jsonl")[1].unusable == {reason: 1}
    monkeypatch.setattr("data_sources.source_identity.LARGE_BYTES", 1)
    source = SourceConfig(path=str(tmp_path / "a.jsonl"))
    how = {"verbatim": False, "max_bad_fraction": 0.1, "cache": tmp_path / "cache", "workers": 1}
    assert load_source(source, **how)[1].unusable == {reason: 1}


# Settings and commands


def test_settings_of_a_source_that_are_misspelt(tmp_path):
    (tmp_path / "a.yaml").write_text("data: {sources: [{path: a.jsonl, wieght: 2}]}")
    with pytest.raises(
        ConfigError, match=r"sources\[0\]\.wieght: unknown .* did you mean weight\?"
    ):
        load_given(tmp_path / "a.yaml", ())


def test_what_is_no_weight(rlhf):
    code, _, error = rlhf("inspect", "--data", "a.jsonl=abc")
    assert code == 2
    assert "'abc' is no weight for a.jsonl" in error


TEMPLATES = {"broken.jinja": "{{ m.content }", "none.jinja": None}


@pytest.mark.parametrize("command", ["inspect", "stats"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_cannot_be_read(tmp_path, rlhf, command, name):
    if TEMPLATES[name] is not None:
        (tmp_path / name).write_text(TEMPLATES[name])
    code, out, error = rlhf(command, "--data", "a.jsonl", "--set", f"data.chat_template={name}")
    assert (code, out) == (2, "")
    assert error.startswith(f"rlhf: error: data.chat_template {name}: ")


@pytest.mark.parametrize("command", ["inspect", "stats"])
def test_a_chat_template_that_refuses(tmp_path, rlhf, command, shared_dir):
    (tmp_path / "refuse.jinja").write_text("{{ raise_exception('no') }}")
    model = str(shared_dir / "tokenizers" / "opt")
    template = ["--set", "data.chat_template=refuse.jinja"]
    code, _, error = rlhf(command, "--data", "a.jsonl", "--model", model, *template)
    assert code == 2
    assert "the chat template refuse.jinja cannot write" in error
    assert "data.chat_template" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["inspect", "stats"])
@pytest.mark.parametrize("order", [("a.jsonl", "odd.jsonl"), ("odd.jsonl", "a.jsonl")])
def test_a_source_that_cannot_be_used_is_named_once_wherever_it_stands(
    tmp_path, rlhf, command, order
):
    (tmp_path / "odd.jsonl").write_text(lines([{"x": 1}]))
    code, out, error = rlhf(command, *(word for name in order for word in ("--data", name)))
    assert code == 2
    assert "a.jsonl" in out
    assert (out + error).count("fit no known shape") == 1


@pytest.mark.parametrize("command", ["inspect", "stats"])
def test_data_that_no_stage_can_start_with(rlhf, command):
    code, out, error = rlhf(command, "--data", "a.jsonl", "--eval-data", "a.jsonl")
    assert code == 2
    assert "a.jsonl" in out
    assert "stage sft has nothing to train on" in error
    code, _, error = rlhf(
        command, "--data", "a.jsonl", "--eval-data", "a.jsonl", "--data-split", "shared"
    )
    assert "see --data-split shared, " in error


def test_rows_of_a_stage_are_those_that_it_gets(tmp_path, rlhf):
    """Questions have no answer: there is no row of SFT, and nothing is shown as one."""
    (tmp_path / "q.jsonl").write_text(lines([{"prompt": f"q{i}"} for i in range(200)]))
    code, out, _ = rlhf("inspect", "--data", "q.jsonl", "--limit", "1")
    assert code == 0
    assert "ppo row 1" in out
    assert "sft row" not in out
    code, out, error = rlhf("inspect", "--data", "q.jsonl", "--limit", "1", "--stage", "sft")
    assert code == 2
    assert "sft row" not in out
    assert "record 1" in out
    assert "stage sft has nothing to train on" in error


@pytest.mark.parametrize("command", ["inspect", "stats"])
def test_what_a_normaliser_leaves_out_is_not_bad(tmp_path, monkeypatch, rlhf, command):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "left.py").write_text(
        "def some(row):\n    return row if int(row['prompt'][1:]) % 2 else None\n"
        "def none(row):\n    return None\n"
        "def fails(row):\n    return row['nope']\n"
    )

    def source(function):
        value = f"data.sources=[{{path: a.jsonl, normaliser: 'left.py:{function}'}}]"
        return ("--set", value, "--data-split", "shared")

    code, out, _ = rlhf(command, *source("some"))
    assert code == 0
    assert "left out" in out
    assert "left out by the normaliser: a.jsonl" not in out
    code, _, error = rlhf(command, *source("none"))
    assert code == 2
    assert "its normaliser left out all of 200 rows" in error
    code, out, error = rlhf(command, *source("fails"))
    assert code == 2
    assert "KeyError: 'nope' (left.py, line 6)" in out
    assert "200 of 200 rows are unusable" in error
    assert "fix the normaliser" in error
    assert "raise data.max_bad_fraction" not in error


def test_bad_rows_and_those_left_out_are_counted_apart(tmp_path, monkeypatch, rlhf):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "left.py").write_text("def f(row):\n    return row if row.pop('en') else None\n")
    rows = [{**row, "en": i % 4 > 0} for i, row in enumerate(pairs(200))]
    (tmp_path / "b.jsonl").write_text(lines([*rows, {**rows[1], "chosen": ""}]))
    source = "data.sources=[{path: b.jsonl, normaliser: 'left.py:f'}]"
    code, out, _ = rlhf("stats", "--set", source, "--data-split", "shared", "--json")
    found = json.loads(out)["sources"][0]
    assert code == 0
    assert [(bad["reason"], bad["rows"]) for bad in found["bad_rows"]] == [("chosen is empty", 1)]
    assert found["left_out"] == {"left out by the normaliser": 50}
    _, out, _ = rlhf("stats", "--set", source, "--data-split", "shared")
    assert re.search(r"b\.jsonl +left out +left out by the normaliser +50 ", out)
    assert re.search(r"b\.jsonl +bad +chosen is empty +1 ", out)


def test_lengths_fit_into_eighty_columns(rlhf):
    _, out, _ = rlhf("stats", "--data", "a.jsonl", "--data-split", "shared")
    assert max(map(len, out.splitlines())) <= 80
    # 200 prompts of two to four characters: 10 of two, 90 of three, 100 of four; mean 3.45.
    assert re.search(r"ppo +prompt +200 +3\.5 +2 +3 +4 +4 +4 ", out)
    assert "over limit   from shortest" in out
