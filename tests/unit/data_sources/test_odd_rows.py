"""Rows that no shape expects: each is counted with a reason, and the others are used."""

import json

import pytest

from data_sources.load import load_source
from data_sources.row_maker import UNEXPECTED
from data_sources.shapes import Shape
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError

PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}
SCORED = {"question": "q", "response_j": "a", "response_k": "b"}
IDS = {"prompt": "p", "rendered": True, "tokenizer": "t", "prompt_ids": [1]}
IDS |= {"response": "a", "response_ids": [2]}


def message(name, parent, **more):
    return {"message_id": name, "parent_id": parent, "text": name, "role": "prompter", **more}


def reply(text, rank):
    return {"text": text, "role": "assistant", "rank": rank, "replies": []}


def tree(replies):
    return {"prompt": {"text": "q", "role": "prompter", "replies": replies}}


def load(tmp_path, rows, limit=0.5):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_source(SourceConfig(path=str(path)), verbatim=False, max_bad_fraction=limit)


@pytest.mark.parametrize(
    ("good", "odd", "reason"),
    [
        (SCORED, {"question": "q", "response_k": "b"}, "the two answers are missing"),
        (SCORED, {"question": "q"}, "the two answers are missing"),
        (
            {"instruction": "i", "output": "o", "history": [["a", "b"]]},
            {"instruction": "i", "output": "o", "history": True},
            "history is not a list of [question, answer]",
        ),
        (IDS, {**IDS, "response_ids": 1.5}, "response_ids are not a list"),
        (IDS, {**IDS, "prompt_ids": 10**30}, "prompt_ids are not a list"),
        (IDS, {**IDS, "prompt_ids": ["x"]}, "prompt_ids are not integers"),
        (tree([reply("a", 0)]), tree(5), "replies is not a list"),
        (
            tree([reply("a", 0), reply("b", 1)]),
            tree([reply("a", "x"), reply("b", 2)]),
            "rank is not a number",
        ),
        (message("1", None), message("2", ["1"]), "its parent message is missing"),
        *[
            (PAIR, {**PAIR, "margin": margin}, "margin is not a number")
            for margin in (float("inf"), float("-inf"), float("nan"), "1e999", 10**400, [1])
        ],
        (PAIR, {**PAIR, "margin": 1e300}, "margin is too large"),
        (PAIR, {**PAIR, "margin": "-1000001"}, "margin is too large"),
        (
            {"prompt": "p", "rendered": True, "chosen": "a", "rejected": "b"},
            {"prompt": "p", "rendered": True, "chosen": "a", "rejected": "b", "margin": 1e7},
            "margin is too large",
        ),
    ],
)
def test_an_odd_row_is_counted_and_the_others_are_used(tmp_path, good, odd, reason):
    for rows in ([good, odd], [odd, good]):
        records, counts = load(tmp_path, rows)
        assert len(records) == 1
        assert dict(counts.unusable) == {reason: 1}


def test_ranks_given_as_text_and_as_numbers_are_compared_as_numbers(tmp_path):
    (record,), _ = load(tmp_path, [tree([reply("worse", 10), reply("better", "9")])])
    assert (record.chosen, record.rejected) == ("better", "worse")


@pytest.mark.parametrize("odd", [[1], [True], [1.5], [None], [[]], ["from"], {"a": 1}])
@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_first_conversations_without_turns_are_bad_rows(tmp_path, column, odd):
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    records, counts = load(tmp_path, [{column: odd}, {column: turns}, {column: turns}])
    assert len(records) == 2
    assert counts.unusable.total() == 1
    assert counts.shape == "conversations"


@pytest.mark.parametrize(
    "kind", [TypeError, KeyError, ValueError, AttributeError, StopIteration, IndexError]
)
def test_whatever_a_row_trips_over_is_a_bad_row(tmp_path, monkeypatch, kind):
    def trip(row, columns, verbatim):
        raise kind("x")

    monkeypatch.setattr("data_sources.load.recognise", lambda *_: Shape("any", trip, {}))
    with pytest.raises(ConfigError, match=f"mostly {UNEXPECTED} .*{kind.__name__}"):
        load(tmp_path, [PAIR])


LONE = "smile \ud83d"


@pytest.mark.parametrize(
    ("good", "odd", "column"),
    [
        (PAIR, {**PAIR, "prompt": LONE}, "prompt"),
        (PAIR, {**PAIR, "chosen": LONE}, "chosen"),
        (PAIR, {**PAIR, "system": LONE}, "system"),
        (
            {"instruction": "i", "output": "o", "history": [["a", "b"]]},
            {"instruction": "i", "output": "o", "history": [["a", LONE]]},
            "history",
        ),
        (
            {"messages": [{"role": "user", "content": "q"}]},
            {"messages": [{"role": "user", "content": LONE}]},
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": "q"}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONE}]}]},
            "messages",
        ),
        (tree([reply("a", 0)]), tree([reply(LONE, 0)]), "text"),
        (IDS, {**IDS, "response": LONE}, "response"),
    ],
)
def test_half_of_a_surrogate_pair_is_a_bad_row(tmp_path, good, odd, column):
    records, counts = load(tmp_path, [good, odd])
    assert len(records) == 1
    assert dict(counts.unusable) == {f"{column} is not valid Unicode": 1}


def test_whole_surrogate_pairs_are_text(tmp_path):
    (record,), _ = load(tmp_path, [{**PAIR, "chosen": "\U0001f600"}])
    assert record.chosen == "\U0001f600"


def test_what_is_shown_of_an_odd_row_is_one_printable_line(tmp_path):
    turn = {"role": "a\nb\ud83d", "content": "q"}
    with pytest.raises(ConfigError, match=r"unknown role") as caught:
        load(tmp_path, [{"messages": [turn]}])
    assert "a b\\ud83d" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_nothing_but_deep_json_is_an_error_with_its_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(ConfigError, match=r"\(a.jsonl line 1: JSON is nested too deeply\)"):
        load_source(SourceConfig(path=str(path)), verbatim=False, max_bad_fraction=1.0)


def test_many_columns_keep_the_error_one_readable_line():
    from data_sources.fields import listed

    assert listed(["a", "b"]) == "a, b"
    assert listed([]) == "none"
    assert listed((f"c{i}" for i in range(50000)), most=2) == "c0, c1, ... (50000 in all)"
    assert len(listed(["x" * 100000])) == 40


@pytest.mark.parametrize("odd", [{"prompt": {"replies": 1}}, {**PAIR, "rendered": True}])
def test_one_row_of_another_shape_does_not_decide_the_shape(tmp_path, odd):
    rows = [{**PAIR, "prompt": f"p{i}"} for i in range(9)]
    records, counts = load(tmp_path, [odd, *rows])
    assert counts.shape == "prompt + chosen + rejected"
    assert [r.messages[0].content for r in records][-9:] == [f"p{i}" for i in range(9)]
