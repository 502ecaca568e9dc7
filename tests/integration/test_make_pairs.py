"""`rlhf data make-pairs` from the command line, on a tiny model and on stories260K."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from data_sources.embedded import EmbeddedTask, prepare
from data_sources.load import load_source
from rlhf_app.cli import run
from rlhf_app.config.schema import SourceConfig

SCORER = """
def vowels(prompts, responses):
    return [sum(letter in "aeiou" for letter in text) for text in responses]
"""


def vowels(text: str) -> int:
    return sum(letter in "aeiou" for letter in text)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedTask:
    return prepare(tmp_path_factory.mktemp("task") / "embedded", seed=5)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def prompt_file(path: Path) -> Path:
    """Twenty questions as messages, and one that comes twice."""
    names = ["lamp", "river", "garden", "cat", "dog", "horse", "kitchen", "boat", "song", "clock"]
    texts = [f"Tell me about the {a} and the {b}." for a in names[:5] for b in names[5:9]]
    turns = [{"messages": [{"role": "user", "content": text}]} for text in [*texts, texts[0]]]
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return path


@pytest.mark.slow
def test_prompts_of_a_file(task: EmbeddedTask, tmp_path: Path, run_cli: Any) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "vowel_scores.py").write_text(SCORER)
    prompt_file(tmp_path / "questions.jsonl")

    def make(name: str, *more: str) -> tuple[Path, Path, str]:
        out, held_out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}_eval.jsonl"
        # A random model writes marks and words in an order that no text has: short answers.
        flags = ["--max-new-tokens", "3", "--min-gap", "1", "--eval-prompts", "5", *more]
        files = ["--prompts", "questions.jsonl", "--out", str(out), "--eval-out", str(held_out)]
        model = ["--model", str(task.actor), "--scorer", "vowel_scores:vowels"]
        done = run_cli("data", "make-pairs", *model, *files, "--chat-format", "plain", *flags)
        assert done.returncode == 0, done.stderr
        return out, held_out, done.stdout

    out, held_out, text = make("first")
    training, evaluation = rows(out), rows(held_out)
    tokenizer = AutoTokenizer.from_pretrained(task.actor)
    pairs = training + [row for row in evaluation if "chosen" in row]
    assert len(training) >= 10
    for row in pairs:
        assert row["rendered"] is True
        assert tokenizer(row["prompt"])["input_ids"] == row["prompt_ids"]
        for side in ("chosen", "rejected"):
            assert row[f"{side}_score"] == vowels(row[side])
            ids = [i for i in row[f"{side}_ids"] if i != tokenizer.eos_token_id]
            encoded = tokenizer(row["prompt"] + row[side])["input_ids"]
            assert encoded == row["prompt_ids"] + ids
        assert row["chosen_score"] - row["rejected_score"] > 1

    # Every prompt is in one file, the repeated one once.
    prompts = {row["prompt"] for row in evaluation}
    assert len(prompts) == 5
    assert not prompts & {row["prompt"] for row in training}
    assert all(prompt.startswith("Tell me about the ") for prompt in prompts)
    for words in ("15", "5", "90", "30", "text round trip"):
        assert words in text

    # Same seed, same bytes, however the answers are batched; another seed differs.
    again, _, _ = make("again", "--batch-size", "7")
    assert again.read_bytes() == out.read_bytes()
    other, _, _ = make("other", "--seed", "2")
    assert other.read_bytes() != out.read_bytes()

    # What training reads: the pairs with their ids, and every held-out prompt.
    records, counts = load_source(SourceConfig(path=str(out)), verbatim=False, max_bad_fraction=0)
    assert counts.records == len(training)
    for record, row in zip(records, training, strict=True):
        assert record.ids is not None
        assert record.rendered
        assert (record.chosen, list(record.ids.chosen)) == (row["chosen"], row["chosen_ids"])
        assert list(record.ids.prompt) == row["prompt_ids"]


@pytest.mark.slow
def test_best_answers_are_sft_rows(task: EmbeddedTask, tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / "vowel_scores.py").write_text(SCORER)
    prompt_file(tmp_path / "questions.jsonl")
    flags = ["--max-new-tokens", "3", "--chat-format", "plain", "--best-of", "--num-answers", "4"]
    files = ["--prompts", "questions.jsonl", "--out", "best.jsonl"]
    model = ["--model", str(task.actor), "--scorer", "vowel_scores.py:vowels"]
    done = run_cli("data", "make-pairs", *model, *files, *flags)
    assert done.returncode == 0, done.stderr
    # A random model hardly ever ends within three tokens.
    assert "answers were cut by --max-new-tokens 3: SFT on them" in done.stderr
    path = tmp_path / "best.jsonl"
    records, _ = load_source(SourceConfig(path=str(path)), verbatim=False, max_bad_fraction=0)
    assert len(records) >= 15
    for record, row in zip(records, rows(path), strict=True):
        assert record.sft_target == row["response"]
        assert row["response_score"] == vowels(row["response"])
        assert record.ids is not None
        assert list(record.ids.response) == row["response_ids"]
        assert not record.is_pair


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-answers", "1"], "--num-answers 1: a pair needs at least 2"),
        (["--pairs-per-prompt", "0"], "--pairs-per-prompt 0: give a number above 0, or all"),
        (["--top-p", "0"], "--top-p 0.0: give a number in (0, 1]"),
        (["--temperature", "nan"], "--temperature nan: give a number above 0"),
        (["--eval-out", "out.jsonl"], "--eval-out out.jsonl: is the file of --out"),
        (["--eval-out", "out.csv"], "--eval-out out.csv: the file is JSONL"),
        (["--prompts", "x.jsonl", "--self-prompts", "8"], "give one of them"),
        (["--prompts", "x.jsonl"], "--prompts x.jsonl: no such file"),
        (["--scorer", "nowhere:f"], "scorer nowhere:f: no module nowhere"),
        (["--max-new-tokens", "500"], "--max-new-tokens 500: "),
        (["--prompt-tokens", "120"], "--prompt-tokens 120 and --max-new-tokens 40 exceed"),
        (
            ["--self-prompts", "4", "--prompt-tokens", "2", "--eval-out", "e.jsonl"],
            "--eval-prompts 256: there are only 4 prompts",
        ),
        (["--chat-format", "chatml"], "--chat-format"),
    ],
)
def test_bad_input_is_one_line(
    task: EmbeddedTask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "vowel_scores", raising=False)
    (tmp_path / "vowel_scores.py").write_text(SCORER)
    model = ["--model", str(task.actor), "--scorer", "vowel_scores:vowels", "--out", "out.jsonl"]
    assert run(["data", "make-pairs", *model, *flags]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert message in line
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
def test_stories_of_a_trained_model(
    shared_dir: Path, repo_root: Path, tmp_path: Path, run_cli: Any
) -> None:
    pytest.importorskip("vaderSentiment")
    from transformers import AutoTokenizer

    model = shared_dir / "models" / "stories260K"
    out, held_out = tmp_path / "pairs.jsonl", tmp_path / "eval.jsonl"
    done = run_cli(
        *("data", "make-pairs", "--model", str(model), "--no-eos"),
        *("--scorer", f"{repo_root / 'tests' / 'data' / 'vader.py'}:positive"),
        *("--out", str(out), "--eval-out", str(held_out)),
        *("--self-prompts", "160", "--eval-prompts", "40"),
    )
    assert done.returncode == 0, done.stderr
    assert "were cut" not in done.stderr
    evaluation = rows(held_out)
    assert len({row["prompt"] for row in evaluation}) == 40
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [row for row in rows(out) + evaluation if "chosen" in row]
    assert len(pairs) > 130
    for row in pairs:
        assert len(row["prompt_ids"]) == 17
        for side in ("chosen", "rejected"):
            assert len(row[f"{side}_ids"]) == 40
            encoded = tokenizer(row["prompt"] + row[side])["input_ids"]
            assert encoded == row["prompt_ids"] + row[f"{side}_ids"]
    # Most answers come back from their text at all; the mean is that of the untuned model.
    (trip,) = [line for line in done.stdout.splitlines() if "text round trip" in line]
    shares = [float(word.rstrip("%")) for word in trip.split() if word.endswith("%")]
    assert min(shares) > 94
    (score,) = [
        line for line in done.stdout.splitlines() if "mean score " in line and "best" not in line
    ]
    values = [float(word) for word in score.split() if word.replace(".", "").isdecimal()]
    assert 0.3 < mean(values) < 0.6
