"""The selection on arrays is the one that the rules make row by row, to the last place."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_sources.blend import take_rates
from data_sources.counts import SourceCounts
from data_sources.identity import content_uid, prompt_key, unit_hash, unit_hashes
from data_sources.record_table import ListedRecords
from data_sources.records import Message, Record
from data_sources.selection import Selected
from data_sources.split import restricted_shares, stage_shares
from data_sources.stage_data import load_stage_data
from rlhf_app.config.schema import STAGES, DataConfig, RunConfig, SourceConfig
from rlhf_app.errors import ConfigError


def row(prompt, kind):
    answers = {
        "pair": {"chosen": "yes", "rejected": "no"},
        "answer": {"response": "r"},
        "bare": {},
    }[kind]
    made = Record((Message("user", f"q {prompt}"),), **answers)
    return Record(made.messages, **answers, uid=content_uid(made))


def stage_of(key, shares):
    position, upper = unit_hash("stage", key), 0.0
    for name, share in shares.items():
        upper += share
        if position < upper:
            return name
    return name


def in_order(pairs, seed):
    def rank(pair):
        return (unit_hash("order", str(seed), pair[0].uid, str(pair[1])), pair[1])

    return [record for record, _ in sorted(pairs, key=rank)]


def expected(config, stage, tables, given_eval):
    """Row by row: (training records, evaluation records, dropped and repeated rows)."""
    data, seed, lost = config.data, config.seed, Counter()
    rows = []
    for place, source in enumerate(data.sources):
        records = tables[source.path]
        if source.max_rows is not None and source.max_rows < len(records):
            ranked = sorted(range(len(records)), key=lambda i: unit_hash("cap", records[i].uid))
            records = [records[i] for i in sorted(ranked[: source.max_rows])]
        rows += [(record, place) for record in records]
    only = [source.only_stages for source in data.sources]
    shares = {} if data.split == "shared" else stage_shares(data.split, config.stages)

    def claim(key, place):
        mine = shares
        if only[place]:
            mine = restricted_shares(data.split, config.stages, only[place])
        return stage_of(key, mine) if mine else None

    if data.split == "shared":
        mine = [(r, s) for r, s in rows if not only[s] or stage in only[s]]
    else:
        claims = {}
        for record, place in rows:
            key = prompt_key(record.messages)
            if claim(key, place):
                claims.setdefault(key, set()).add(claim(key, place))

        def home(key):
            usual = stage_of(key, shares) if shares else None
            return usual if usual in claims[key] else min(claims[key], key=STAGES.index)

        mine = []
        for record, place in rows:
            key = prompt_key(record.messages)
            if claim(key, place) == stage:
                if home(key) == stage:
                    mine.append((record, place))
                else:
                    lost["elsewhere"] += 1

    def suits(record, place):
        bare = place is not None and data.sources[place].prompts_only
        if stage == "sft":
            return record.sft_target is not None and not bare
        return stage == "ppo" or (record.is_pair and not bare)

    suitable = [(r, s) for r, s in mine if suits(r, s)]
    if given_eval:
        evaluation = [r for r in given_eval if suits(r, None)]
        keys = {prompt_key(r.messages) for r in evaluation}
    else:
        keys = {prompt_key(r.messages) for r, _ in suitable}
        keys = {key for key in keys if unit_hash("evaluation", key) < data.eval_fraction}
        evaluation = [r for r, _ in suitable if prompt_key(r.messages) in keys]
    training = [(r, s) for r, s in suitable if prompt_key(r.messages) not in keys]
    sizes = Counter(place for _, place in training)
    there = sorted(sizes)
    rates = take_rates(
        [data.sources[i].weight for i in there], [sizes[i] for i in there],
        data.blend.temperature, data.blend.exhaustion,
    )  # fmt: skip
    rate_of = dict(zip(there, rates, strict=True))
    taken = []
    for record, place in training:
        whole = math.floor(rate_of[place])
        rest = rate_of[place] - whole
        number = whole + (unit_hash("blend", str(seed), record.uid) < rest)
        taken += [(record, copy) for copy in range(number)]
    unique = {}
    for record in evaluation:
        name = prompt_key(record.messages) if stage == "ppo" else record.uid
        unique.setdefault(name, record)
    held = in_order([(record, 0) for record in unique.values()], 0)[: data.eval_limit]
    return in_order(taken, seed), held, lost["elsewhere"]


SOURCES = st.lists(
    st.fixed_dictionaries(
        {
            "rows": st.lists(
                st.tuples(st.integers(0, 30), st.sampled_from(["pair", "answer", "bare"])),
                min_size=1,
                max_size=25,
            ),
            "stages": st.sampled_from([(), (), ("sft",), ("reward", "ppo"), ("ppo",)]),
            "prompts_only": st.booleans(),
            "weight": st.sampled_from([0.3, 1.0, 2.0, 2.7]),
            "max_rows": st.sampled_from([None, None, 3, 12]),
        }
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    sources=SOURCES,
    evaluation=st.lists(st.integers(0, 40), max_size=8),
    split=st.sampled_from(["shared", (2, 4, 4), (0, 1, 1), (1, 0, 3)]),
    stages=st.sampled_from([STAGES, ("sft", "ppo"), ("reward",)]),
    blend=st.sampled_from(
        [{}, {"temperature": 3}, {"exhaustion": "first_exhausted"}, {"exhaustion": "all_exhausted"}]
    ),
    seed=st.integers(0, 3),
    eval_limit=st.sampled_from([3, 1000]),
)
def test_every_row_has_the_place_that_the_rules_give_it(
    sources, evaluation, split, stages, blend, seed, eval_limit
):
    tables = {f"s{i}": [row(*r) for r in source["rows"]] for i, source in enumerate(sources)}
    given_eval = [row(number, "pair") for number in evaluation]
    named = []
    for i, source in enumerate(sources):
        prompts_only = source["prompts_only"] and source["stages"] in ((), ("ppo",))
        settings_of = {key: source[key] for key in ("stages", "weight", "max_rows")}
        named.append(SourceConfig(path=f"s{i}", prompts_only=prompts_only, **settings_of))
    config = RunConfig(
        stages=stages,
        seed=seed,
        data=DataConfig(
            sources=tuple(named),
            eval=(SourceConfig(path="eval"),) if given_eval else (),
            eval_fraction=0.3,
            eval_limit=eval_limit,
            split=split,
            blend=blend,
        ),
    )

    def read(source, is_evaluation):
        records = given_eval if is_evaluation else tables[source.path]
        return ListedRecords(records), SourceCounts(source.path)

    for stage in stages:
        try:
            found = load_stage_data(config, stage, read)
        except ConfigError:
            continue
        train, held, elsewhere = expected(config, stage, tables, given_eval)
        assert [r.uid for r in found.train] == [r.uid for r in train]
        assert [r.uid for r in found.evaluation] == [r.uid for r in held]
        part = found.counts.stages[stage]
        there = "prompt belongs to another stage, which other sources have it for"
        assert part.dropped[there] == elsewhere
        assert part.candidates + part.repeated == (
            part.train + part.evaluation + part.dropped.total()
        )


@settings(derandomize=True)
@given(
    numbers=st.lists(st.integers(0, 2**64 - 1), max_size=5),
    before=st.lists(st.text(max_size=4), min_size=1, max_size=2),
    after=st.lists(st.text(max_size=4), max_size=2),
)
def test_hashes_of_many_rows_are_those_of_each(numbers, before, after):
    found = unit_hashes(np.array(numbers, dtype=np.uint64), *before, after=after)
    assert found.tolist() == [unit_hash(*before, f"{n:016x}", *after) for n in numbers]


def test_a_selection_looks_its_records_up_and_is_named_by_all_of_them():
    class Named(ListedRecords):
        fingerprint = "x"

    draw = random.Random(1)
    tables = [Named([row(i + 100 * t, "pair") for i in range(20)]) for t in range(2)]
    places = [(draw.randrange(2), draw.randrange(20)) for _ in range(50)]
    table_N, row_N = (np.array(column) for column in zip(*places, strict=True))
    rows = Selected(tables, [False, True], table_N.astype(np.uint16), row_N)
    assert len(rows) == 50
    for place, (table, number) in enumerate(places):
        record = rows[place]
        assert record.uid == tables[table][number].uid
        assert record.is_pair == (table == 0)
        assert rows.is_pair_N[place] == (table == 0)
    assert list(rows) == [rows[i] for i in range(50)] == rows[:]
    assert rows[-1] == rows[49]
    with pytest.raises(IndexError):
        rows[50]
    other = rows.take(np.arange(50)[::-1])
    assert [r.uid for r in other] == [r.uid for r in rows][::-1]
    assert rows.fingerprint == Selected(tables, [False, True], rows.table_N, row_N).fingerprint
    assert len({rows.fingerprint, other.fingerprint, rows.take(np.arange(49)).fingerprint}) == 3


def test_ppo_evaluates_a_prompt_once_with_the_first_record_of_it():
    records = [row(number, kind) for kind in ("pair", "answer") for number in range(60)]
    config = RunConfig(
        data=DataConfig(sources=(SourceConfig(path="a"),), split="shared", eval_fraction=0.4)
    )
    found = load_stage_data(config, "ppo", lambda *_: (ListedRecords(records), SourceCounts("a")))
    assert len(found.evaluation) > 10
    assert all(record.is_pair for record in found.evaluation)
    assert found.counts.stages["ppo"].dropped["repeated in the evaluation data"] == len(
        found.evaluation
    )
