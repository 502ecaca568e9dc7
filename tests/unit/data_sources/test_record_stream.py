"""Streams: the rows that a stored source would give, in a seeded order, a window at a time."""

from __future__ import annotations

import json
import random
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_sources import streamed_examples
from data_sources.encoded import ListedExamples
from data_sources.encodings import SFTEncoding
from data_sources.identity import prompt_key
from data_sources.record_stream import RecordStream, StreamedSource, shuffled
from data_sources.records import Message, Record
from data_sources.stage_data import load_stage_data
from data_sources.streamed_examples import StreamedExamples
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError


@settings(derandomize=True)
@given(size=st.integers(0, 60), buffer=st.integers(1, 80), seed=st.integers(0, 3))
def test_a_shuffle_gives_every_row_once_and_looks_no_further_than_its_buffer(size, buffer, seed):
    found = list(shuffled(range(size), buffer, random.Random(seed)))
    assert sorted(found) == list(range(size))
    assert all(row <= place + buffer for place, row in enumerate(found))
    assert found == list(shuffled(range(size), buffer, random.Random(seed)))


def record(name, number):
    return Record((Message("user", f"{name} {number}"),), response="r", uid=f"{number:016x}")


def stream(sources, *, buffer=1000, seed=1, wanted=None, rows=10, rows_per_step=2):
    everything = wanted or (lambda table: np.ones(len(table), dtype=bool))
    named = [
        StreamedSource(
            name, lambda counts, n=name, s=size: (record(n, i) for i in range(s)), weight
        )
        for name, size, weight in sources
    ]
    return RecordStream(
        named, everything, seed=seed, buffer=buffer, rows=rows, rows_per_step=rows_per_step
    )


def texts(records, number):
    return [r.messages[0].content for r in islice(records, number)]


def test_a_pass_is_a_permutation_and_each_pass_another():
    everyone = {f"a {i}" for i in range(50)}
    first, second = (texts(stream([("a", 50, 1)]), 100)[i : i + 50] for i in (0, 50))
    assert set(first) == set(second) == everyone
    assert first != second
    assert first != sorted(first)
    assert texts(stream([("a", 50, 1)]), 100) == first + second
    assert texts(stream([("a", 50, 1)], seed=2), 50) != first


def test_sources_come_in_their_shares_from_the_start():
    found = texts(stream([("a", 500, 3.0), ("b", 20, 1.0)]), 400)
    for end in range(4, 401, 4):
        assert Counter(text[0] for text in found[:end]) == {"a": end * 3 // 4, "b": end // 4}
    assert len(set(found)) == 320  # b's 20 rows came five times


def test_a_source_with_nothing_for_the_stage_is_an_error_and_no_endless_search():
    with pytest.raises(ConfigError, match="none of its 0 rows is there for this stage"):
        next(iter(stream([("a", 30, 1)], wanted=lambda table: np.zeros(len(table), dtype=bool))))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(2500)]


def run_config(source, stage="sft", **data):
    ends = {"sft": {"max_steps": 9}, "reward": {"max_steps": 9}, "ppo": {"updates": 9}}
    return RunConfig.model_validate(
        {"data": {"sources": [source], "eval_fraction": 0.1, **data}, **ends}
    )


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
@pytest.mark.parametrize("with_eval", [False, True])
def test_a_stream_trains_on_what_stored_data_would(tmp_path, stage, with_eval):
    source = write(tmp_path / "a.jsonl", ROWS)
    data = {"eval": [write(tmp_path / "e.jsonl", ROWS[::7])]} if with_eval else {}
    stored = load_stage_data(run_config(source, **data), stage)
    streamed = load_stage_data(run_config(source, streaming=True, **data), stage)
    assert len({r.uid for r in stored.train}) == len(stored.train) > 100
    one_pass = list(islice(streamed.train, len(stored.train)))
    assert {r.uid for r in one_pass} == {r.uid for r in stored.train}
    assert [r.uid for r in streamed.evaluation] == [r.uid for r in stored.evaluation]
    held = {prompt_key(r.messages) for r in streamed.evaluation}
    assert not held & {prompt_key(r.messages) for r in islice(streamed.train, 4000)}


def test_the_evaluation_is_of_the_first_rows(tmp_path):
    source = write(tmp_path / "a.jsonl", ROWS)
    streamed = load_stage_data(run_config(source, streaming=True, look_ahead=300), "sft")
    stored = load_stage_data(run_config(write(tmp_path / "b.jsonl", ROWS[:300])), "sft")
    assert [r.uid for r in streamed.evaluation] == [r.uid for r in stored.evaluation]
    # Held-out rows beyond them are not trained on either.
    whole = load_stage_data(run_config(source), "sft")
    held = {r.uid for r in whole.evaluation}
    assert not held & {r.uid for r in islice(streamed.train, 3000)}


def test_too_many_bad_rows_stop_a_stream_on_the_way(tmp_path):
    bad = [{"prompt": "q", "chosen": None, "rejected": "no"}] * 1000
    config = run_config(
        write(tmp_path / "a.jsonl", [*ROWS[:1500], *bad]),
        streaming=True, look_ahead=1000, shuffle_buffer=1, split="shared",
    )  # fmt: skip
    data = load_stage_data(config, "reward")
    assert len(list(islice(data.train, 800))) == 800
    with pytest.raises(ConfigError, match="rows are unusable"):
        list(islice(data.train, 5000))


def test_rows_that_are_joined_are_refused(tmp_path):
    rows = [
        {"message_id": "a", "parent_id": None, "text": "q", "role": "prompter"},
        {"message_id": "b", "parent_id": "a", "text": "r", "role": "assistant"},
    ] * 1  # fmt: skip
    for i in range(60):
        rows += [
            {"message_id": f"a{i}", "parent_id": None, "text": f"q{i}", "role": "prompter"},
            {"message_id": f"b{i}", "parent_id": f"a{i}", "text": "r", "role": "assistant"},
        ]
    config = run_config(write(tmp_path / "a.jsonl", rows), streaming=True, split="shared")
    with pytest.raises(ConfigError, match=r"joined from all rows.*data\.streaming"):
        next(iter(load_stage_data(config, "ppo").train))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sft": {}}, r"set sft\.max_steps"),
        ({"reward": {}}, r"set reward\.max_steps"),
        ({"ppo": {}}, r"set ppo\.updates"),
        ({"ppo": {"updates": 2, "ptx_coef": 1.0}}, r"ppo\.ptx_coef"),
        ({"data": {"blend": {"temperature": 2}}}, r"data\.blend"),
        ({"data": {"sources": [{"path": "a", "max_rows": 3}]}}, "max_rows"),
        ({"data": {"sources": [{"path": "a", "stages": ["sft"]}]}}, "stages and prompts_only"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_at_once(changed, message):
    good = {
        "data": {"sources": ["a"], "streaming": True},
        "sft": {"max_steps": 2}, "reward": {"max_steps": 2}, "ppo": {"updates": 2},
    }  # fmt: skip
    RunConfig.model_validate(good)
    data = good["data"] | changed.get("data", {})
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(good | changed | {"data": data})


_spec = spec_from_file_location("stored_worker", Path(__file__).with_name("stored_worker.py"))
_worker = module_from_spec(_spec)
_spec.loader.exec_module(_worker)
FMT = _worker.chat_format()  # one byte a token: "a 1" and its answer come to 9, "a 12" to 10


def test_examples_are_those_of_the_records_in_order(monkeypatch):
    monkeypatch.setattr(streamed_examples, "HEAD", 5)
    encoding = SFTEncoding(FMT, "hash", 9, "drop")
    made = stream([("a", 40, 1)], rows=60, rows_per_step=4)
    listed = ListedExamples.of(list(islice(made, 300)), encoding)
    assert listed.reasons == {"row longer than the limit": 300 - len(listed)}
    found = StreamedExamples(made, encoding)
    assert found.in_order
    assert len(found) == len(found.lengths) == 60
    assert [list(row) for row in found.token_rows()] == [e.input_ids for e in listed[:5]]
    assert list(found.token_rows().lengths) == list(listed.lengths[:5])
    for start in range(0, 60, 4):
        places = range(start, start + 4)
        assert [found.lengths[i] for i in places] == [listed.lengths[i] for i in places]
        assert [found[i] for i in reversed(places)] == [listed[i] for i in reversed(places)]
        assert [found.targets(i) for i in places] == [listed.targets(i) for i in places]
        assert found[0] == listed[0]
    with pytest.raises(KeyError):
        found[1]


def test_a_stream_of_rows_that_never_fit_ends(monkeypatch):
    monkeypatch.setattr(streamed_examples, "MOST_LOST", 30)
    short = SFTEncoding(FMT, "hash", 2, "drop")
    with pytest.raises(ConfigError, match=r"none of 30 rows in a row .* row longer than the limit"):
        StreamedExamples(stream([("a", 40, 1)]), short)
