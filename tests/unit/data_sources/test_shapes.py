"""Every shape: raw rows in, exact records out."""

import json

import pytest

from data_sources.load import load_source
from data_sources.records import Message, TokenIds
from data_sources.shapes import recognise
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError

U, A, S = "user", "assistant", "system"
HH = "\n\nHuman: q\n\nAssistant:"

LONG = "What is the answer to this?"
# name, raw row, (messages, response, chosen, rejected)
TABLE = [
    (
        "prompt + chosen + rejected",
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "prompt + chosen + rejected",
        {"prompt": HH, "response": " r", "chosen": " good", "rejected": " bad"},
        ([(U, "q")], "r", "good", "bad"),
    ),
    (
        "prompt + chosen + rejected",
        {"prompt": HH + " I think", "chosen": " so", "rejected": " not"},
        ([(U, "q")], None, "I think so", "I think not"),
    ),
    (
        "prompt + chosen + rejected",
        {"system": "s", "question": "q", "chosen": "good", "rejected": "bad"},
        ([(S, "s"), (U, "q")], None, "good", "bad"),
    ),
    (
        "prompt + chosen + rejected",
        {"instruction": "do", "input": "it", "chosen": "good", "rejected": "bad"},
        ([(U, "do\nit")], None, "good", "bad"),
    ),
    (
        "prompt + chosen + rejected",
        {"prompt": LONG + " ", "chosen": LONG + " good", "rejected": LONG + " bad"},
        ([(U, LONG)], None, "good", "bad"),
    ),
    (
        # Not a repeated prompt: people begin alike.
        "prompt + chosen + rejected",
        {"prompt": "Hi", "chosen": "Hi there!", "rejected": "Hi."},
        ([(U, "Hi")], None, "Hi there!", "Hi."),
    ),
    (
        "prompt + chosen + rejected",
        {"prompt": "q", "chosen_response": "good", "rejected_response": "bad"},
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "prompt + chosen + rejected",
        {
            "prompt": [{"role": "user", "content": "q"}],
            "chosen": [{"role": "assistant", "content": "good"}],
            "rejected": [{"role": "assistant", "content": "bad"}],
        },
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "prompt + chosen + rejected",
        {
            "prompt": "q",
            "messages": [{"role": "user", "content": "q"}],
            "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}],
            "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "bad"}],
        },
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "conversations + chosen + rejected",
        {
            "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        ([(S, "s"), (U, "q")], None, "good", "bad"),
    ),
    (
        "conversations + chosen + rejected",
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": "good",
            "rejected": "bad",
        },
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "chosen + rejected transcripts",
        {"chosen": HH + " good", "rejected": HH + " bad"},
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "chosen + rejected conversations",
        {
            "chosen": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "good"},
            ],
            "rejected": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "bad"},
            ],
        },
        ([(U, "a"), (A, "b"), (U, "c")], None, "good", "bad"),
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ]
        },
        ([(U, "a"), (A, "b"), (U, "c")], "d", None, None),
    ),
    (
        "conversations",
        {
            "system": "s",
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": "f()"},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": "b"},
            ],
        },
        ([(S, "s"), (U, "a"), (A, "f()"), ("tool", "1")], "b", None, None),
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": "a"}]},
        ([(U, "a")], None, None, None),
    ),
    (
        "messages",
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "label": False,
        },
        ([(U, "a")], None, None, None),
    ),
    (
        "instruction + output",
        {"instruction": "do", "input": "", "output": "done", "history": [["x", "y"]]},
        ([(U, "x"), (A, "y"), (U, "do")], "done", None, None),
    ),
    (
        "prompt + response",
        {"prompt": "### Q\nq\n### A", "answer": " a\n"},
        ([(U, "### Q\nq\n### A")], "a", None, None),
    ),
    ("prompt + response", {"QUESTION": "q", "Completion": "a"}, ([(U, "q")], "a", None, None)),
    (
        "prompt + response",
        {
            "prompt": [{"role": "user", "content": "q"}],
            "completion": [{"role": "assistant", "content": "a"}],
        },
        ([(U, "q")], "a", None, None),
    ),
    ("prompt alone", {"prompt": "q"}, ([(U, "q")], None, None, None)),
    ("text alone", {"text": "t", "url": "u"}, ([(U, "t")], None, None, None)),
    (
        "prompt + response",
        {"question": "q", "human_answers": ["a", "b"], "chatgpt_answers": ["c"]},
        ([(U, "q")], "a", None, None),
    ),
    (
        "prompt + response",
        {"prompt": "USER: q ASSISTANT:", "label": " a"},
        ([(U, "q")], "a", None, None),
    ),
    ("instruction + output", {"INSTRUCTION": "q", "RESPONSE": "a"}, ([(U, "q")], "a", None, None)),
    (
        "question + passages",
        {
            "query": "q",
            "positive_passages": [{"text": "good"}, {"text": "x"}],
            "negative_passages": [{"text": "bad"}],
        },
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "two scored answers",
        {
            "question": "q",
            "response_j": "bad",
            "response_k": "good",
            "score_j": 1.0,
            "score_k": 2.5,
        },
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "two scored answers",
        {"question": "q", "response_j": "good", "response_k": "bad"},
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "two scored answers",
        {"history": "q", "human_ref_A": "bad", "human_ref_B": "good", "labels": 0},
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "two scored answers",
        {
            "question": {"full_text": "q"},
            "answer_0": "good [1], yes [2, 3].",
            "answer_1": "bad",
            "score_0": 0.5,
            "score_1": -0.5,
        },
        ([(U, "q")], None, "good, yes.", "bad"),
    ),
    (
        "two scored answers",
        {"prompt": "q", "response_0": "bad", "response_1": "good", "better_response_id": 1},
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "prompt + ranked responses",
        {"prompt": "q", "responses": ["mid", "bad", "good"], "scores": [2, 1, 3]},
        ([(U, "q")], None, "good", "bad"),
    ),
    (
        "prompt + ranked responses",
        {"prompt": "q", "answers": [{"answer": "bad", "rank": 7}, {"answer": "good", "rank": 1}]},
        ([(U, "q")], None, "good", "bad"),
    ),
]


def load(tmp_path, rows, *, verbatim=False, limit=1.0, columns=None):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=str(path), columns=columns or {})
    return load_source(source, verbatim=verbatim, max_bad_fraction=limit)


def messages(pairs):
    return tuple(Message(role, content) for role, content in pairs)


@pytest.mark.parametrize(("shape", "row", "expected"), TABLE)
def test_shape_and_record(tmp_path, shape, row, expected):
    records, counts = load(tmp_path, [row])
    assert counts.shape == shape
    (record,) = records
    found = (record.messages, record.response, record.chosen, record.rejected)
    assert found == (messages(expected[0]), *expected[1:])
    assert not record.rendered
    assert record.margin is None
    assert record.source == "data.jsonl"
    assert len(record.uid) == 16


def test_plain_format_keeps_texts_as_they_are(tmp_path):
    rows = [{"prompt": HH, "chosen": " good ", "rejected": "\tbad"}]
    records, _ = load(tmp_path, rows, verbatim=True)
    assert records[0].messages == (Message("user", HH),)
    assert (records[0].chosen, records[0].rejected) == (" good ", "\tbad")
    rows = [{"chosen": HH + " good ", "rejected": HH + " bad"}]
    records, _ = load(tmp_path, rows, verbatim=True)
    assert records[0].messages == (Message("user", HH),)
    assert (records[0].chosen, records[0].rejected) == (" good ", " bad")


def test_sampled_answers_keep_their_ids(tmp_path):
    pair = {
        "prompt": HH,
        "chosen": " good",
        "rejected": "",
        "rendered": True,
        "tokenizer": "abc",
        "prompt_ids": [2, 5],
        "chosen_ids": [6, 2],
        "rejected_ids": [2],
        "chosen_score": 1.0,
        "rejected_score": 0.0,
        "margin": 0.5,
    }
    prompt = {"prompt": HH, "rendered": True, "tokenizer": "abc", "prompt_ids": [2, 5]}
    (first, second), counts = load(tmp_path, [pair, prompt])
    assert counts.shape == "sampled answers"
    assert first.messages == second.messages == (Message("user", HH),)
    assert (first.rendered, first.chosen, first.rejected, first.margin) == (True, " good", "", 0.5)
    assert first.ids == TokenIds("abc", prompt=(2, 5), chosen=(6, 2), rejected=(2,))
    assert second.ids == TokenIds("abc", prompt=(2, 5))
    assert not second.is_pair


def test_reply_trees_nested_and_flat_give_the_same_records(tmp_path):
    def node(name, role, text, rank=None, replies=(), **more):
        return {
            "message_id": name,
            "role": role,
            "text": text,
            "rank": rank,
            "replies": list(replies),
            **more,
        }

    follow_up = node("p2", "prompter", "and then?", replies=[node("a4", "assistant", "that")])
    tree = node(
        "p1",
        "prompter",
        "q",
        replies=[
            node("a1", "assistant", "middle", 1),
            node("a2", "assistant", "good", 0, [follow_up]),
            node("a3", "assistant", "bad", 2),
            node("a5", "assistant", "gone", 3, deleted=True),
        ],
    )
    nested, counts = load(tmp_path, [{"message_tree_id": "t", "prompt": tree}])
    assert counts.shape == "reply trees"
    found = [(r.messages, r.response, r.chosen, r.rejected) for r in nested]
    assert found == [
        (messages([(U, "q")]), None, "good", "bad"),
        (messages([(U, "q"), (A, "good"), (U, "and then?")]), "that", None, None),
    ]

    flat, stack = [], [(tree, None)]
    while stack:
        one, parent = stack.pop()
        flat.append({k: v for k, v in one.items() if k != "replies"} | {"parent_id": parent})
        stack += [(reply, one["message_id"]) for reply in one["replies"]]
    orphan = {"message_id": "x", "parent_id": "lost", "role": "assistant", "text": "?"}
    records, counts = load(tmp_path, [*flat, orphan])
    assert sorted(r.uid for r in records) == sorted(r.uid for r in nested)
    assert (counts.read, counts.usable) == (8, 7)
    assert counts.unusable == {"its parent message is missing": 1}


# shape's good row, bad row, reason
GOOD = {"prompt": "q", "chosen": "a", "rejected": "b"}
GOOD_HH = {"chosen": HH + " a", "rejected": HH + " b"}
GOOD_CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
UNUSABLE = [
    (GOOD, {"prompt": "q", "chosen": None, "rejected": "b"}, "chosen is missing"),
    (GOOD, {"prompt": "q", "chosen": "a"}, "rejected is missing"),
    (GOOD, {"prompt": "q", "chosen": " ", "rejected": "b"}, "chosen is empty"),
    (GOOD, {"prompt": "", "chosen": "a", "rejected": "b"}, "prompt is empty"),
    (GOOD, {"prompt": "q", "chosen": True, "rejected": "b"}, "chosen is not text"),
    (GOOD, {"prompt": "q", "chosen": {"x": 1}, "rejected": "b"}, "chosen is not text"),
    (GOOD, {**GOOD, "margin": "much"}, "margin is not a number"),
    (
        GOOD_HH,
        {"chosen": HH + " a", "rejected": "\n\nHuman: other\n\nAssistant: b"},
        "transcripts share no '\\n\\nAssistant:'",
    ),
    (GOOD_HH, {"chosen": HH + " ", "rejected": HH + " b"}, "a transcript ends in an empty answer"),
    (
        GOOD_HH,
        {"chosen": HH + " a\n\nHuman: r\n\nAssistant: c", "rejected": HH + " b"},
        "transcripts part before the last answer",
    ),
    (GOOD_CHAT, {"messages": []}, "messages holds no turns"),
    (GOOD_CHAT, {"messages": [{"role": "alien", "content": "a"}]}, "messages has an unknown role"),
    (GOOD_CHAT, {"messages": [{"content": "a"}]}, "messages has a turn without role"),
    (
        GOOD_CHAT,
        {"messages": [{"role": "user", "content": None}]},
        "messages has a turn without text",
    ),
    (GOOD_CHAT, {"messages": [{"role": "assistant", "content": "a"}]}, "messages has no user turn"),
    (
        {"question": "q", "response_j": "a", "response_k": "b", "score_j": 1, "score_k": 0},
        {"question": "q", "response_j": "a", "response_k": "b", "score_j": 1, "score_k": 1},
        "answers are tied",
    ),
    (
        {"prompt": "q", "responses": ["a", "b"], "scores": [0, 1]},
        {"prompt": "q", "responses": ["a", "b"], "scores": [0]},
        "responses comes with no scores or ranks of the same number",
    ),
]


@pytest.mark.parametrize(("good", "bad", "reason"), UNUSABLE)
def test_unusable_rows_are_counted_by_reason_with_their_place(tmp_path, good, bad, reason):
    records, counts = load(tmp_path, [good, bad, good])
    assert len(records) == 2
    assert (counts.read, counts.usable, counts.unusable) == (3, 2, {reason: 1})
    assert counts.samples[reason][0].startswith("data.jsonl line 2")


def test_labelled_answers_and_unseen_tools_are_remarked(tmp_path):
    row = {**GOOD_CHAT, "tools": "[...]"}
    _, counts = load(tmp_path, [{**row, "label": False}, {**row, "label": True}])
    assert counts.notes == {
        "tools column is not shown to the model": 2,
        "answer labelled undesirable: prompt only": 1,
    }
    assert counts.usable == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "t", "label": 1}, ("text, label", "no known shape", "prompt + chosen")),
        ({"chosen": "a", "rejected": "b"}, ("neither transcripts", "columns")),
        ({"prompt": "p", "question": "q", "response": "a"}, ("prompt and question", "columns")),
        ({"prompt": "p", "answer": "a", "output": "b"}, ("answer and output", "response")),
        ({"prompt": "p", "chosen": "a"}, ("no known shape",)),
        ({}, ("none",)),
    ],
)
def test_unknown_and_ambiguous_columns_are_errors_that_name_columns_and_fix(row, words):
    with pytest.raises(ConfigError) as caught:
        recognise("some.jsonl", [row])
    message = str(caught.value)
    assert message.startswith("some.jsonl: columns ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_mapped_columns(tmp_path):
    rows = [{"frage": "q", "gut": "good", "schlecht": "bad", "prompt": "decoy"}]
    mapped = {"prompt": "frage", "chosen": "gut", "rejected": "schlecht"}
    records, _ = load(tmp_path, rows, columns=mapped)
    assert records[0].messages == (Message("user", "q"),)
    assert (records[0].chosen, records[0].rejected) == ("good", "bad")
    with pytest.raises(ConfigError, match="names 'nope' for prompt"):
        load(tmp_path, rows, columns={"prompt": "nope"})


def test_too_many_unusable_rows_stop_with_count_reason_and_place(tmp_path):
    rows = [GOOD] * 8 + [{**GOOD, "chosen": ""}] * 2
    load(tmp_path, rows, limit=0.2)
    with pytest.raises(ConfigError, match="2 of 10 rows are unusable, mostly chosen is empty") as e:
        load(tmp_path, rows, limit=0.19)
    assert "line 9" in str(e.value)
    with pytest.raises(ConfigError, match="1 of 1 rows"):
        load(tmp_path, [{**GOOD, "chosen": ""}], limit=1.0)
