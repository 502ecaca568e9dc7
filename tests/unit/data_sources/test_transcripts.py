"""Turns inside strings; expected turns are written by hand."""

import pytest

from data_sources.records import Message
from data_sources.transcripts import merge_turns, parse_turns, split_transcripts


def turns(*pairs):
    return tuple(Message(role, content) for role, content in pairs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n\nHuman: hi\n\nAssistant:", turns(("user", "hi"))),
        (
            "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: bye\n\nAssistant:",
            turns(("user", "hi"), ("assistant", "yes?"), ("user", "bye")),
        ),
        ("Human: hi\n\nAssistant: I", turns(("user", "hi"), ("assistant", "I"))),
        (" Human: one line Assistant:", turns(("user", "one line"))),
        ("User: list it\n[1, 2]\nAssistant: ", turns(("user", "list it\n[1, 2]"))),
        ("User: twice escaped?\\nAssistant: ", turns(("user", "twice escaped?"))),
        (
            "User: a\nAssistant: b\nUser: c\nAssistant:",
            turns(("user", "a"), ("assistant", "b"), ("user", "c")),
        ),
        (
            "Be brief.\n\nHuman: hi\n\nAssistant:",
            turns(("system", "Be brief."), ("user", "hi")),
        ),
        (
            "\n\nHuman: a\n\nHuman: b\n\nAssistant:",
            turns(("user", "a\n\nb")),
        ),
        ("What is a Human: being?", None),
        ("no marks at all", None),
        ("\n\nAssistant: only me", None),
        ("", None),
    ],
)
def test_turns_written_in_a_string(text, expected):
    assert parse_turns(text) == expected


def test_merging_strips_drops_empty_turns_and_joins_neighbours():
    given = turns(("user", " a "), ("user", "b"), ("assistant", "  "), ("user", "c"))
    assert merge_turns(given) == turns(("user", "a\n\nb\n\nc"))


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        (
            "\n\nHuman: q\n\nAssistant: good",
            "\n\nHuman: q\n\nAssistant: bad",
            ("\n\nHuman: q\n\nAssistant:", " good", " bad"),
        ),
        # The mark is shared, and the answers start with the same word.
        (
            "\n\nHuman: q\n\nAssistant: a 1\n\nHuman: r\n\nAssistant: I do",
            "\n\nHuman: q\n\nAssistant: a 1\n\nHuman: r\n\nAssistant: I am",
            ("\n\nHuman: q\n\nAssistant: a 1\n\nHuman: r\n\nAssistant:", " I do", " I am"),
        ),
        # They part before the second mark: the first is the last shared one.
        (
            "\n\nHuman: q\n\nAssistant: x\n\nHuman: r\n\nAssistant: end",
            "\n\nHuman: q\n\nAssistant: y",
            ("\n\nHuman: q\n\nAssistant:", " x\n\nHuman: r\n\nAssistant: end", " y"),
        ),
        ("\n\nHuman: q\n\nAssistant: a", "\n\nHuman: other\n\nAssistant: a", None),
        ("a", "b", None),
        ("", "", None),
        # One is the start of the other.
        ("\n\nAssistant:", "\n\nAssistant: b", ("\n\nAssistant:", "", " b")),
    ],
)
def test_transcripts_split_at_the_last_shared_mark(chosen, rejected, expected):
    assert split_transcripts(chosen, rejected) == expected
