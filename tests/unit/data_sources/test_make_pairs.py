"""Ranking, counting and row making with a scripted model: everything worked by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data_sources.answer_ranking import ScoredAnswer, best_answer, ranked_pairs
from data_sources.jsonl_files import check_output_file, write_jsonl
from data_sources.make_pairs import (
    AnswerSource,
    PairCounts,
    PairSettings,
    evaluation_rows,
    round_trips,
    training_rows,
)
from data_sources.openings import Opening, self_openings
from rlhf_app.errors import ConfigError

EOS, BOS = 0, 1
LETTERS = dict(enumerate("abcdefghij", 2))


class Encoded:
    def __init__(self, ids: list[int], response_start: int) -> None:
        self.ids, self.response_start = ids, response_start


class LetterFormat:
    """One letter, one id; but "ij" is one id too (12), so i and j side by side do not come back."""

    stop_ids = (EOS,)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join({12: "ij"}.get(i, LETTERS.get(i, "")) for i in ids)

    def ids_of(self, text: str) -> list[int]:
        ids = {letter: i for i, letter in LETTERS.items()} | {"_": 12}
        return [ids[letter] for letter in text.replace("ij", "_")]

    def prompt_ids(self, messages: Any, rendered: bool = False) -> list[int]:
        assert rendered
        return [BOS, *self.ids_of(messages[0][1])]

    def encode(self, messages: Any, response: str, rendered: bool = False) -> Encoded:
        assert rendered
        prompt = messages[0][1]
        start = 1 + len(self.ids_of(prompt))
        return Encoded([BOS, *self.ids_of(prompt + response), EOS], start)


FORMAT: Any = LetterFormat()


def answer(score: float, text: str = "a") -> ScoredAnswer:
    return ScoredAnswer(tuple(FORMAT.ids_of(text)), text, score)


def gaps(pairs: list[tuple[ScoredAnswer, ScoredAnswer]]) -> list[tuple[float, float]]:
    return [(better.score, worse.score) for better, worse in pairs]


@pytest.mark.parametrize(
    ("scores", "min_gap", "limit", "expected"),
    [
        ([0.5, 1.0, 0.0], 0.25, 1, [(1.0, 0.0)]),
        ([0.5, 1.0, 0.0], 0.25, None, [(1.0, 0.0), (0.5, 0.0), (1.0, 0.5)]),
        ([0.5, 1.0, 0.0], 0.25, 2, [(1.0, 0.0), (0.5, 0.0)]),
        # The gap has to be wider than min_gap, not as wide.
        ([0.5, 1.0, 0.0], 0.5, None, [(1.0, 0.0)]),
        ([0.5, 1.0, 0.0], 1.0, None, []),
        # No gap at all is asked for: ties still make no pair.
        ([0.5, 0.5, 0.25], 0.0, None, [(0.5, 0.25), (0.5, 0.25)]),
        ([-1.0, -3.0], 0.25, 1, [(-1.0, -3.0)]),
        ([1.0], 0.0, 1, []),
        ([], 0.0, 1, []),
    ],
)
def test_ranked_pairs_by_hand(
    scores: list[float], min_gap: float, limit: int | None, expected: list[tuple[float, float]]
) -> None:
    assert gaps(ranked_pairs([answer(s) for s in scores], min_gap, limit)) == expected


def test_best_answer_takes_the_first_of_equals() -> None:
    answers = [answer(0.5, "a"), answer(1.0, "b"), answer(1.0, "c")]
    best = best_answer(answers)
    assert best is not None
    assert best.text == "b"
    assert best_answer([]) is None


class ScriptedModel:
    """Answers prompt number i with its i-th list of answers; notes who asked with which uid."""

    def __init__(self, answers: list[list[str]], end: bool = True) -> None:
        self._flat = [FORMAT.ids_of(text) + [EOS] * end for texts in answers for text in texts]
        self.calls: list[list[int]] = []

    def __call__(
        self, prompts: Sequence[Sequence[int]], uids: Sequence[int]
    ) -> list[Sequence[int]]:
        self.calls.append(list(uids))
        return [self._flat[uid] for uid in uids]


def opening(text: str) -> Opening:
    return Opening((BOS, *FORMAT.ids_of(text)), text)


def count_b(prompts: list[str], responses: list[str]) -> list[float]:
    """Gold of the tests: how many b's."""
    return [float(text.count("b")) for text in responses]


OPENINGS = [opening("ca"), opening("da"), opening("ea")]
# Prompt ca: 2, 0, 1; da: all 1; ea: one empty answer, one that is only its EOS, one of 0.
ANSWERS = [["bb", "a", "b"], ["b", "ba", "ab"], ["", "", "a"]]


def source(model: Any, batch_size: int = 6, advance: Any = lambda done: None) -> AnswerSource:
    return AnswerSource(model, FORMAT, count_b, 3, batch_size, advance)


def test_pairs_of_a_scripted_model_by_hand() -> None:
    model, counts, done = ScriptedModel(ANSWERS), PairCounts(), []
    answered = source(model, advance=done.append).answer(OPENINGS, 0, counts)
    rows = list(training_rows(answered, PairSettings(0.25, 1, False), "hash", counts))
    assert rows == [
        {
            "prompt": "ca",
            "rendered": True,
            "tokenizer": "hash",
            "prompt_ids": [BOS, 4, 2],
            "chosen": "bb",
            "rejected": "a",
            "chosen_ids": [3, 3, EOS],
            "rejected_ids": [2, EOS],
            "chosen_score": 2.0,
            "rejected_score": 0.0,
        }
    ]
    assert (counts.prompts, counts.answers, counts.rows) == (3, 9, 1)
    assert (counts.small_gap, counts.empty, counts.changed) == (2, 2, 0)
    assert (counts.ended, counts.ended_share) == (9, 1.0)
    # 2+0+1 + 1+1+1 + 0; tokens: the letters and nine EOS.
    assert counts.mean_score == pytest.approx(6 / 9)
    assert counts.tokens == (2 + 1 + 1) + (1 + 2 + 2) + (0 + 0 + 1) + 9
    assert counts.mean_best == pytest.approx((2 + 1 + 0) / 3)
    assert counts.round_trip == 1.0
    # Two prompts fit into a batch of six answers.
    assert model.calls == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert done == [2, 1]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_batch_size_changes_nothing(batch_size: int) -> None:
    def rows(size: int) -> list[dict[str, Any]]:
        counts = PairCounts()
        answered = source(ScriptedModel(ANSWERS), size).answer(OPENINGS, 0, counts)
        return list(training_rows(answered, PairSettings(0.25, None, False), "h", counts))

    assert rows(batch_size) == rows(9)
    assert len(rows(9)) == 3


def test_later_prompts_have_later_random_streams() -> None:
    model = ScriptedModel(ANSWERS)
    list(source(model).answer(OPENINGS[1:], 1, PairCounts()))
    assert model.calls == [[3, 4, 5, 6, 7, 8]]


def test_evaluation_holds_every_prompt() -> None:
    counts = PairCounts()
    answered = source(ScriptedModel(ANSWERS)).answer(OPENINGS, 0, counts)
    rows = list(evaluation_rows(answered, PairSettings(0.25, None, False), "hash", counts))
    assert [row["prompt"] for row in rows] == ["ca", "ca", "ca", "da", "ea"]
    assert ["chosen" in row for row in rows] == [True, True, True, False, False]
    assert rows[3] == {
        "prompt": "da",
        "rendered": True,
        "tokenizer": "hash",
        "prompt_ids": [BOS, 5, 2],
    }
    assert (counts.rows, counts.small_gap) == (3, 2)


def test_best_of_writes_responses() -> None:
    counts, settings = PairCounts(), PairSettings(0.25, 1, best_of=True)
    answered = source(ScriptedModel(ANSWERS)).answer(OPENINGS, 0, counts)
    rows = list(training_rows(answered, settings, "hash", counts))
    assert [(row["prompt"], row["response"]) for row in rows] == [
        ("ca", "bb"),
        ("da", "b"),
        ("ea", "a"),
    ]
    assert [row["response_ids"] for row in rows] == [[3, 3, EOS], [3, EOS], [2, EOS]]
    assert not any("chosen" in row for row in rows)
    assert (counts.rows, counts.small_gap) == (3, 0)

    answered = source(ScriptedModel(ANSWERS)).answer(OPENINGS, 0, PairCounts())
    held_out = list(evaluation_rows(answered, settings, "hash", PairCounts()))
    assert [(r["prompt"], r["response"], r.get("chosen")) for r in held_out] == [
        ("ca", "bb", "bb"),
        ("da", "b", None),
        ("ea", "a", None),
    ]


def test_answers_whose_text_gives_other_ids_are_left_out() -> None:
    class SplitModel(ScriptedModel):
        def __init__(self) -> None:
            super().__init__([["b", "a", "bb"]])
            # "ij" as two tokens, and an answer that melts into the prompt's last letter.
            self._flat = [[3, 10, 11, EOS], [2, EOS], [3, 3, EOS]]

    counts = PairCounts()
    answered = list(source(SplitModel()).answer([opening("ca")], 0, counts))
    assert [a.text for a in answered[0].answers] == ["a", "bb"]
    assert counts.changed == 1
    assert counts.round_trip == pytest.approx(2 / 3)
    # The score of an answer that was left out still counts for the mean: it was sampled.
    assert counts.mean_score == pytest.approx((1 + 0 + 2) / 3)


def test_an_answer_that_changes_the_prompts_ids_is_left_out() -> None:
    class JoinedModel(ScriptedModel):
        def __init__(self) -> None:
            super().__init__([["b", "a", "bb"]])
            self._flat = [[11, 3, EOS], [2, EOS], [3, EOS]]

    counts = PairCounts()
    answered = list(source(JoinedModel()).answer([opening("ci")], 0, counts))
    assert [a.text for a in answered[0].answers] == ["a", "b"]


def test_round_trip_needs_the_border_too() -> None:
    # The whole string gives the sampled ids, but its second "a" belongs to the answer's text.
    shifted = Opening((BOS, 4, 2), "c")
    assert not round_trips(FORMAT, shifted, ScoredAnswer((2, EOS), "aa", 0.0))
    assert round_trips(FORMAT, opening("ca"), ScoredAnswer((2, EOS), "a", 0.0))


def test_answers_cut_by_length_keep_no_end_token() -> None:
    model, counts = ScriptedModel([["bb", "a", "b"]], end=False), PairCounts()
    answered = source(model).answer(OPENINGS[:1], 0, counts)
    (row,) = training_rows(answered, PairSettings(0.25, 1, False), "h", counts)
    assert (row["chosen_ids"], row["rejected_ids"]) == ([3, 3], [2])
    assert (counts.answers, counts.ended) == (3, 0)
    assert counts.round_trip == 1.0


def test_self_openings_are_different_and_exact() -> None:
    # a; a again; "ij" as two tokens; b; nothing but an unknown token; c.
    drawn = [[2, 2], [2, 2], [10, 11], [3, 2], [99, 99], [4, 2]]
    calls: list[list[int]] = []

    def sample(prompts: Sequence[Sequence[int]], uids: Sequence[int]) -> list[list[int]]:
        assert all(list(prompt) == [BOS] for prompt in prompts)
        calls.append(list(uids))
        return [drawn[uid % len(drawn)] for uid in uids]

    found = list(self_openings(sample, FORMAT, BOS, number=3, batch_size=2))
    assert found == [
        Opening((BOS, 2, 2), "aa"),
        Opening((BOS, 3, 2), "ba"),
        Opening((BOS, 4, 2), "ca"),
    ]
    assert calls == [[0, 1], [2, 3], [4, 5]]


def test_a_model_with_too_few_openings_is_an_error() -> None:
    def sample(prompts: Sequence[Sequence[int]], uids: Sequence[int]) -> list[list[int]]:
        return [[2 + uid % 2] for uid in uids]

    with pytest.raises(ConfigError, match="--self-prompts 3: the model gave only 2 different"):
        list(self_openings(sample, FORMAT, BOS, number=3, batch_size=2))


def test_files_are_whole_or_untouched(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"a": "é"}, {"a": 2}])
    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [
        {"a": "é"},
        {"a": 2},
    ]

    def broken() -> Any:
        yield {"a": 3}
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_jsonl(path, broken())
    assert json.loads(path.read_text("utf-8").splitlines()[1]) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows.json", "--out .*rows.json: the file is JSONL"),
        ("directory.jsonl", "--out .*directory.jsonl: is a directory"),
        ("file/rows.jsonl", "--out .*rows.jsonl: cannot be written"),
    ],
)
def test_outputs_that_cannot_be(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "directory.jsonl").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message):
        check_output_file(tmp_path / name, "--out")
