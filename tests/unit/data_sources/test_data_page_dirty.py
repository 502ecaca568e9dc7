"""docs/data.md, "Dirty data" and "See it": its file is read as it says, and its commands run."""

import json
import re

import pytest
from typer.testing import CliRunner

from data_sources.load import load_source
from rlhf_app.cli import app
from rlhf_app.config.schema import DataConfig, SourceConfig


def blocks(repo_root, language):
    text = (repo_root / "docs" / "data.md").read_text(encoding="utf-8")
    part = text[text.index("\n## Dirty data") :]
    return re.findall(rf"```{language}\n(.*?)```", part, re.DOTALL)


def test_the_file_of_five_rows(repo_root, tmp_path):
    rows, reasons = blocks(repo_root, "text")
    path = tmp_path / "five.jsonl"
    path.write_text(rows)
    records, counts = load_source(
        SourceConfig(path=str(path)), verbatim=False, max_bad_fraction=1.0
    )
    assert (counts.read, len(records)) == (5, 1)
    found = {}
    for reason, samples in counts.samples.items():
        (sample,) = samples
        found[reason] = "line " + re.match(r"five\.jsonl line (\d)", sample)[1]
    assert found == dict(line.split(": ") for line in reasons.splitlines())
    assert DataConfig().max_bad_fraction == 0.1


def test_the_commands(repo_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(80)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "pairs.jsonl").write_text(text)
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "other", "response": "a"}))
    (lines,) = blocks(repo_root, "bash")
    outputs = []
    for line in lines.splitlines():
        program, *arguments = line.split()
        assert program == "rlhf"
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.exception
        outputs.append(done.output)
    assert (tmp_path / "pairs.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert json.loads(outputs[1])["stages"]["sft"]["train"] == 80
    assert outputs[2].count("reward row") == 2


@pytest.mark.parametrize("name", ["stats", "inspect"])
def test_help_of_the_commands_names_every_flag_of_the_page(repo_root, name):
    (lines,) = blocks(repo_root, "bash")
    flags = {
        flag
        for line in lines.splitlines()
        if f"data {name}" in line
        for flag in re.findall(r"--[\w-]+", line)
    }
    shown = CliRunner().invoke(app, ["data", name, "--help"], env={"COLUMNS": "200"}).output
    assert flags <= set(re.findall(r"--[\w-]+", shown))
