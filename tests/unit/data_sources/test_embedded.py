"""The embedded default: gold worked by hand, determinism, leak-free split, exact tokenizer."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from data_sources.embedded import EmbeddedTask, find, gold, prepare
from data_sources.embedded.task import EVALUATION_ROWS, PAIR_ROWS, PROMPT_ROWS, SFT_ROWS

ASKED = "Tell me about the lamp and the river.\n"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedTask:
    return prepare(tmp_path_factory.mktemp("run") / "embedded", seed=7)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# Worked by hand: .4 topic + .4 tone + .2 form.
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("", 0.0),
        # Both things, three kind words, a full stop, no pair of words twice.
        ("The lamp is bright and lovely. I love the river.", 1.0),
        # Topic 1/2, tone 1/3, form 1/2 (no full stop).
        ("The lamp is bright", 0.2 + 0.4 / 3 + 0.1),
        # Another thing, a harsh word; only the form is right.
        ("The cat is ugly.", 0.2),
        # Topic 1/2, tone 0, form (1 + 4/7)/2: four different pairs of seven.
        ("The lamp is dull. The lamp is dull.", 0.2 + 0.1 * (1 + 4 / 7)),
        # A kind word counts once: tone 1/3; topic 1/3; form (1 + 7/8)/2.
        ("I love love love the lamp and the cat.", 0.8 / 3 + 0.1 * (1 + 7 / 8)),
        # A harsh word takes one of three kind ones away: tone 2/3, topic 1/2, form 1.
        ("The bright river is gentle, warm and cruel.", 0.2 + 0.8 / 3 + 0.2),
        # More harsh words than kind ones: tone is 0, not negative. Topic 1/2, form 1.
        ("I hate the ugly, cruel but lovely lamp.", 0.4),
        # A fourth kind word adds nothing: topic 1/2, tone 1, form 1.
        ("The river is warm, calm, bright and lovely.", 0.8),
    ],
)
def test_gold_by_hand(answer: str, expected: float) -> None:
    assert gold([ASKED], [answer]) == pytest.approx([expected], abs=1e-12)


def test_gold_refuses_lists_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="argument"):
        gold([ASKED], ["a", "b"])


def test_no_fixed_answer_scores_high_on_every_prompt(task: EmbeddedTask) -> None:
    prompts = [row["prompt"] for row in rows(task.evaluation)]
    fixed = "The lamp is bright and lovely. I love the river."
    # Full tone and form are .6; the topic is right by luck only.
    assert 0.6 <= mean(gold(prompts, [fixed] * len(prompts))) < 0.65


def test_row_counts_and_keys(task: EmbeddedTask) -> None:
    expected = {
        task.sft: (SFT_ROWS, {"prompt", "response"}),
        task.pairs: (PAIR_ROWS, {"prompt", "chosen", "rejected"}),
        task.prompts: (PROMPT_ROWS, {"prompt"}),
        task.evaluation: (EVALUATION_ROWS, {"prompt", "response", "chosen", "rejected"}),
    }
    for path, (count, keys) in expected.items():
        found = rows(path)
        assert len(found) == count
        assert all(set(row) == keys for row in found)


def test_sft_answers_are_of_mixed_quality(task: EmbeddedTask) -> None:
    found = rows(task.sft)
    scores = gold([row["prompt"] for row in found], [row["response"] for row in found])
    assert 0.45 <= mean(scores) <= 0.55
    assert min(scores) < 0.2
    assert max(scores) == pytest.approx(1.0)
    assert len({row["response"] for row in found}) > 0.95 * len(found)


def test_training_labels_agree_with_gold_at_the_designed_rate(task: EmbeddedTask) -> None:
    found = rows(task.pairs)
    gaps = gaps_of(found)
    swapped = sum(gap < 0 for gap in gaps) / len(gaps)
    # 5 % of the labels are noise; 4 standard deviations of the binomial.
    assert abs(swapped - 0.05) < 4 * math.sqrt(0.05 * 0.95 / len(gaps))
    assert min(map(abs, gaps)) >= 0.15 - 1e-12


def test_evaluation_labels_are_those_of_gold(task: EmbeddedTask) -> None:
    assert min(gaps_of(rows(task.evaluation))) >= 0.15 - 1e-12


def gaps_of(found: list[dict[str, str]]) -> list[float]:
    prompts = [row["prompt"] for row in found]
    chosen = gold(prompts, [row["chosen"] for row in found])
    rejected = gold(prompts, [row["rejected"] for row in found])
    return [a - b for a, b in zip(chosen, rejected, strict=True)]


def test_no_held_out_pair_of_things_is_trained_on(task: EmbeddedTask) -> None:
    def asked(path: Path) -> set[frozenset[str]]:
        return {frozenset(re.findall(r"the (\w+)", row["prompt"])) for row in rows(path)}

    held_out = asked(task.evaluation)
    assert all(len(pair) == 2 for pair in held_out)
    for path in (task.sft, task.pairs, task.prompts):
        assert not held_out & asked(path)
    prompts = [row["prompt"] for row in rows(task.evaluation)]
    assert len(set(prompts)) == len(prompts)


def test_same_seed_same_bytes(task: EmbeddedTask, tmp_path: Path) -> None:
    again = prepare(tmp_path / "again", seed=7)
    other = prepare(tmp_path / "other", seed=8)
    expected = contents(task.sft.parent)
    assert contents(again.sft.parent) == expected
    changed = {name for name, data in contents(other.sft.parent).items() if data != expected[name]}
    assert changed >= {
        "base/model.safetensors",
        "sft.jsonl",
        "pairs.jsonl",
        "prompts.jsonl",
        "evaluation.jsonl",
    }
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_find_builds_nothing(task: EmbeddedTask, tmp_path: Path) -> None:
    assert find(task.actor.parent) == task
    assert find(tmp_path) is None
    (tmp_path / "built.json").write_text('{"version": 0, "seed": 7}')
    assert find(tmp_path) is None


def test_prepare_reuses_only_what_the_seed_built(tmp_path: Path) -> None:
    directory = tmp_path / "embedded"
    task = prepare(directory, seed=1)
    first = task.prompts.stat().st_ino
    assert prepare(directory, seed=1) == task
    assert task.prompts.stat().st_ino == first
    before = task.prompts.read_bytes()
    prepare(directory, seed=2)
    assert task.prompts.read_bytes() != before


def test_prepare_leaves_torch_random_state_alone(tmp_path: Path) -> None:
    import torch

    state = torch.random.get_rng_state()
    prepare(tmp_path / "embedded", seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_importing_the_task_does_not_import_torch(repo_root: Path) -> None:
    code = "import data_sources.embedded, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo_root, check=False).returncode == 0


def test_tokenizer_is_exact_and_short(task: EmbeddedTask) -> None:
    tokenizer = load_tokenizer(task)
    found = rows(task.evaluation) + rows(task.pairs)[:1000] + rows(task.sft)[:1000]
    for row in found:
        prompt = tokenizer(row["prompt"])["input_ids"]
        assert prompt.count(tokenizer.bos_token_id) == 1
        assert prompt[0] == tokenizer.bos_token_id
        assert len(prompt) <= 16
        for key in row.keys() - {"prompt"}:
            text = row["prompt"] + row[key]
            ids = tokenizer(text)["input_ids"]
            assert ids[: len(prompt)] == prompt
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            assert len(ids) - len(prompt) + 1 <= 24  # with EOS


def test_tokenizer_names_its_special_tokens(task: EmbeddedTask) -> None:
    tokenizer = load_tokenizer(task)
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert special == (0, 1, 2)
    assert tokenizer("the quark")["input_ids"][-1] == tokenizer.unk_token_id
    # One token for a word with its space, one for the mark.
    assert len(tokenizer(" lamp.", add_special_tokens=False)["input_ids"]) == 2


def test_base_model_is_untrained_and_matches_the_tokenizer(task: EmbeddedTask) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(task)
    model = AutoModelForCausalLM.from_pretrained(task.actor)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor([tokenizer(rows(task.sft)[0]["prompt"])["input_ids"]])
    loss = model(input_ids=ids, labels=ids).loss.item()
    # Random weights know nothing: near the entropy of a uniform guess.
    assert abs(loss - math.log(len(tokenizer))) < 1.0


def load_tokenizer(task: EmbeddedTask) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(task.actor)
