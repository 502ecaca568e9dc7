"""`rlhf data stats`: counts of a small dirty set in a table, as JSON and as a page."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from data_sources.identity import prompt_key
from data_sources.records import Message
from data_sources.split import held_out, stages_of
from rlhf_app.commands.data_stats import stats
from rlhf_app.config.schema import STAGES
from rlhf_app.errors import ConfigError

EVIL = '</pre><script>alert("x")</script>\x1b[31m\u202e&amp;'


def pairs():
    """60 pairs, chosen longer in 40 of them; one exact copy, one prompt again, two bad rows."""
    rows = [
        {
            "prompt": f"question {i} \u05e9\u05dc\u05d5\u05dd" if i == 5 else f"question {i}",
            "chosen": "longer" if i < 40 else "no",
            "rejected": "short" if i < 40 else "maybe",
        }
        for i in range(60)
    ]
    rows += [rows[3], {**rows[4], "prompt": "  QUESTION 4", "rejected": "longer"}]
    return [*rows, {"prompt": "p", "chosen": "c"}, {"prompt": EVIL, "chosen": "", "rejected": "r"}]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("NO_COLOR", "1")
    app = typer.Typer()
    app.command()(stats)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    answers = [{"prompt": f"{EVIL} {i}", "response": EVIL * (1 + i)} for i in range(40)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))

    def call(*arguments):
        result = CliRunner().invoke(app, list(arguments))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    return call


def test_json_of_sources_and_stages(run, tmp_path):
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    found = json.loads(run("--data", a, "--data", b, "--data-split", "shared", "--json"))
    assert found["unit"] == "characters"
    first, second = found["sources"]
    assert (first["path"], first["shape"]) == (a, "prompt + chosen + rejected")
    assert (first["rows"], first["usable"], first["records"]) == (64, 62, 62)
    assert first["bad_rows"] == [
        {"reason": "rejected is missing", "rows": 1, "examples": ["a.jsonl line 63"]},
        {"reason": "chosen is empty", "rows": 1, "examples": ["a.jsonl line 64"]},
    ]
    assert not first["stops_a_run"]
    assert (first["exact_duplicates"], first["same_prompt"]) == (1, 1)
    assert (first["different_prompts"], first["identical_pairs"]) == (60, 1)
    assert first["prompt_scripts"] == {"Latin": 62}
    assert second["records"] == 40
    stages = found["stages"]
    assert [stages[name]["given"] for name in ("sft", "reward", "ppo")] == [102, 102, 102]
    assert stages["reward"]["left_out"] == {"no pair of answers (reward)": 40}
    bias = stages["reward"]["length_bias"]["a.jsonl"]
    # The copy has its longer answer chosen too; the repeated prompt has two equal answers.
    assert (bias["longer_chosen"], bias["shorter_chosen"], bias["equal_length"]) == (41, 20, 1)
    assert stages["reward"]["lengths"]["chosen"]["max"] == len("longer")
    assert stages["sft"]["lengths"]["answer"]["max"] == len(EVIL) * 40
    assert set(stages["ppo"]["lengths"]) == {"prompt", "row"}


def test_the_split_is_the_one_that_a_run_makes(run, tmp_path):
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"prompt": f"q{i}", "response": "a"}) + "\n" for i in range(400))
    )
    found = json.loads(run("--data", str(tmp_path / "c.jsonl"), "--json"))
    keys = [prompt_key([Message("user", f"q{i}")]) for i in range(400)]
    numbers = np.array([int(key, 16) for key in keys], dtype=np.uint64)
    shares = {"sft": 0.2, "reward": 0.4, "ppo": 0.4}
    for name in ("sft", "ppo"):
        mine = [
            key
            for key, stage in zip(keys, stages_of(numbers, shares), strict=True)
            if STAGES[stage] == name
        ]
        held = sum(held_out(key, 0.05) for key in mine)
        counts = {"train": len(mine) - held, "evaluation": held}
        assert found["stages"][name]["by_source"] == {"c.jsonl": counts}
    assert "nothing to train on" in found["stages"]["reward"]["problem"]


def test_tokens_limits_and_what_they_cost(run, tmp_path, shared_dir):
    """A row is BOS, the prompt, " " and the answer, and EOS; 20 tokens are kept of it."""
    model = str(shared_dir / "tokenizers" / "opt")
    answers = [1, 2, 3, 16, 17, 30, 40, 50]  # 16 make a row of 20
    rows = [{"prompt": f"question {i}", "response": " yes" * n} for i, n in enumerate(answers)]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "other 9", "response": " yes"}))
    found = json.loads(
        run(
            *("--sft-data", str(path), "--eval-data", str(held), "--model", model),
            *("--chat-format", "plain", "--max-length", "20", "--json"),
        )
    )
    sft = found["stages"]["sft"]
    assert found["unit"] == "tokens"
    assert sft["lengths"]["answer"]["count"] == 9
    assert sft["lengths"]["answer"]["max"] == 51
    assert sft["lengths"]["prompt"]["max"] == 3  # </s>, question, number
    assert sft["lengths"]["row"]["max"] == 54
    assert (sft["limit"], sft["over_limit"]) == (20, 4)
    assert sft["left_out_or_cut"] == {"answer truncated (kept)": 4}


def test_tables_for_people(run, tmp_path):
    output = run("--data", str(tmp_path / "a.jsonl"), "--data-split", "shared")
    assert re.search(r"a\.jsonl +prompt \+ chosen \+ rejected +64 +62 +2 \(3\.1 %\) +0 +62", output)
    assert re.search(r"bad +rejected is missing +1 +a\.jsonl line 63", output)
    assert re.search(r"a\.jsonl +41 \(67\.2 %\) +20 \(32\.8 %\) +1 ", output)
    assert "Latin 62 (100.0 %)" in output
    assert "\x1b" not in output


def test_too_many_bad_rows_are_shown_and_named(run, tmp_path):
    rows = [*pairs()[:2], {"prompt": "p"}, {"prompt": "p"}]
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="2 of 4 rows are unusable, mostly chosen is missing"):
        run("--data", str(path))


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes = set(), set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_page_is_one_file_of_tables_and_plots(run, tmp_path):
    page = tmp_path / "page.html"
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    output = run("--data", a, "--data", b, "--data-split", "shared", "--html", str(page))
    assert f"page: {page}" in output
    text = page.read_text(encoding="utf-8")
    parser = _Tags()
    parser.feed(text)
    assert not parser.tags & {"script", "link", "img", "iframe", "object"}
    assert not parser.attributes & {"src", "href", "onclick", "onload"}
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
    # Other people's text: escaped, and without control characters.
    assert "&lt;script&gt;alert(&quot;x&quot;)" in text
    assert "\\x1b[31m\\u202e&amp;amp;" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]
    names = [plot.get("aria-label") for plot in plots]
    assert {"sft: answer", "reward: chosen", "reward: rejected", "ppo: prompt"} <= set(names)
    # The bars of a histogram are as high as their counts say, up to a pixel.
    for plot in plots:
        bars = [bar for bar in plot if bar.tag == "rect" and len(bar)]
        counts = [int(bar[0].text.split(": ")[1]) for bar in bars]
        for bar, count in zip(bars, counts, strict=True):
            height = 110 * count / max(counts)
            assert int(bar.get("height")) == pytest.approx(height, abs=1)


def test_settings_of_a_file_and_flags_over_it(run, tmp_path):
    rows = [{"frage": f"q{i % 38}", "gut": "g", "schlecht": "s"} for i in range(40)]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "frage", "chosen": "gut", "rejected": "schlecht"}
    source = {"path": str(tmp_path / "e.jsonl"), "columns": columns}
    settings = tmp_path / "run.yaml"
    settings.write_text(json.dumps({"data": {"sources": [source], "eval_fraction": 0.5}}))
    found = json.loads(run("--config", str(settings), "--data-split", "shared", "--json"))
    assert found["sources"][0]["exact_duplicates"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "/no/such.jsonl"], "does not exist"),
        ([], "no data for sft"),
        (["--html", "/no/such/page.html"], "no directory /no/such"),
        (["--html", "/"], "is a directory"),
        (["--html", "/etc/hostname"], "exists and is no page"),
    ],
)
def test_bad_flags_are_one_line(run, arguments, words):
    with pytest.raises(ConfigError, match=words) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)
