"""`rlhf data inspect` prints shapes, counts, texts and marked tokens."""

import json
import re

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
    whole = show("--model", model, "--limit", "1")
    tokens = int(re.search(r"answer: (\d+) tokens", whole)[1])
    output = show("--model", model, "--limit", "1", "--max-length", "12")
    assert "answer truncated (kept) (12)" in output
    assert "answer: 12 tokens" in output
    assert f"<<< [cut: {tokens - 12} tokens]" in output


def test_what_was_lost_at_the_start_is_shown_there(show, shared_dir, tmp_path):
    model = str(shared_dir / "tokenizers" / "opt")
    settings = tmp_path / "run.yaml"
    settings.write_text("data: {truncation: {sft: left}, max_length: 12}")
    output = show("--model", model, "--limit", "1", "--config", str(settings))
    assert re.search(r"\[cut: \d+ tokens\] </s>.*>>> good \d+</s><<<", output, re.DOTALL)


def test_the_mask_of_every_assistant_turn(shared_dir, tmp_path, monkeypatch):
    """Two answers of one conversation carry loss, each with its end token."""
    monkeypatch.setenv("NO_COLOR", "1")
    turns = [("user", "one?"), ("assistant", "first"), ("user", "two?"), ("assistant", "second")]
    rows = [{"messages": [{"role": r, "content": f"{c} {i}"} for r, c in turns]} for i in range(60)]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    app = typer.Typer()
    app.command()(inspect)
    settings = tmp_path / "run.yaml"
    settings.write_text("data: {sft_loss_on: assistant_turns}")
    model = str(shared_dir / "tokenizers" / "opt")
    flags = ["--data", str(path), "--data-split", "shared", "--limit", "1", "--model", model]
    masks = {}
    for extra in ([], ["--config", str(settings)]):
        result = CliRunner().invoke(app, [*flags, *extra], catch_exceptions=False)
        masks[len(extra)] = re.findall(r">>>(.*?)<<<", result.output, re.DOTALL)
    (number,) = {re.sub(r"\D", "", mask) for mask in masks[2]}
    assert masks[0] == [f" second {number}</s>"]
    assert len(masks[2]) == 2
    assert masks[2][0].startswith(f" first {number}")
    assert masks[2][1] == masks[0][0]


def test_colours_can_be_turned_off(tmp_path, monkeypatch, shared_dir):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "response": "\\u001b[2Jyes"}\n' * 2)
    app = typer.Typer()
    app.command()(inspect)
    model = str(shared_dir / "tokenizers" / "opt")
    (tmp_path / "held.jsonl").write_text('{"prompt": "other", "response": "no"}')
    flags = ["--sft-data", str(tmp_path / "a.jsonl"), "--eval-data", str(tmp_path / "held.jsonl")]
    flags += ["--model", model, "--limit", "1"]
    coloured = CliRunner().invoke(app, flags, color=True).output
    assert "\x1b[32m" in coloured or "\x1b[1;92m" in coloured
    assert "\x1b[2J" not in coloured  # the data's own
    bare = CliRunner().invoke(app, [*flags, "--no-color"], color=True).output
    assert not re.search(r"\x1b\[[\d;]*(3|9)\dm", bare)
    assert ">>>" in bare
    assert "\\x1b[2Jyes" in re.sub(r"\x1b\[[\d;]*m", "", bare)


def test_problems_of_a_stage_do_not_hide_the_data(show):
    output = show("--data-split", "1,0,1")
    assert "stage reward has share 0" in output
    assert "user: question" in output


def test_bad_flags_are_errors(show):
    with pytest.raises(ConfigError, match="--stage rm is no stage"):
        show("--stage", "rm")
    with pytest.raises(ConfigError, match="--data-split"):
        show("--data-split", "1,2")
