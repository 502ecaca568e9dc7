"""`rlhf data inspect` prints shapes, counts, texts and marked tokens."""

import json

import pytest
import typer
from typer.testing import CliRunner

from rlhf_app.commands.data_inspect import inspect
from rlhf_app.errors import ConfigError


@pytest.fixture
def show(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    app = typer.Typer()
    app.command()(inspect)
    path = tmp_path / "a.jsonl"
    rows = [
        {"prompt": f"question {i}", "chosen": f"good {i}", "rejected": "bad"} for i in range(200)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "chosen": ""}]))

    def run(*arguments):
        result = CliRunner().invoke(app, ["--data", str(path), *arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    return run


def test_text_only(show):
    output = show("--stage", "reward", "--limit", "1")
    assert "prompt + chosen + rejected" in output
    assert "1 chosen is empty" in output
    assert "a.jsonl line 201" in output
    assert "user: question" in output
    assert "chosen: good" in output
    assert "rejected: bad" in output
    assert output.count("reward row") == 1


def test_tokens_with_marked_answers(show, shared_dir):
    model = str(shared_dir / "tokenizers" / "opt")
    output = show("--model", model, "--limit", "1")
    assert ">>> good" in output
    assert "</s><<<" in output
    assert "</s>\n\nHuman: question" in output
    pairs = show("--model", model, "--limit", "1", "--stage", "reward")
    assert ">>> bad</s><<<" in pairs
    prompts = show("--model", model, "--limit", "1", "--stage", "ppo")
    assert "0 marked" in prompts
    assert ">>>" not in prompts


def test_truncation_is_shown(show, shared_dir):
    model = str(shared_dir / "tokenizers" / "opt")
    output = show("--model", model, "--limit", "1", "--max-length", "12")
    assert "answer truncated (kept) (12)" in output


def test_problems_of_a_stage_do_not_hide_the_data(show):
    output = show("--data-split", "1,0,1")
    assert "stage reward has share 0" in output
    assert "user: question" in output


def test_bad_flags_are_errors(show):
    with pytest.raises(ConfigError, match="--stage rm is no stage"):
        show("--stage", "rm")
    with pytest.raises(ConfigError, match="--data-split"):
        show("--data-split", "1,2")
