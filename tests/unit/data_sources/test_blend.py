"""Shares, caps and places of whole blends: in proportion, the same everywhere, without leaks."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_sources.blend import most_rows, take_rates
from data_sources.counts import SourceCounts
from data_sources.identity import content_uid, prompt_key
from data_sources.record_table import ListedRecords
from data_sources.records import Message, Record, TokenIds
from data_sources.stage_data import load_stage_data
from rlhf_app.config.schema import STAGES, DataConfig, RunConfig, SourceConfig
from rlhf_app.errors import ConfigError


def pair(number, answer="yes"):
    made = Record((Message("user", f"q {number}"),), chosen=answer, rejected="no")
    return Record(made.messages, chosen=answer, rejected="no", uid=content_uid(made))


def reader(rows):
    """Reads sources out of a dict; each reading is a new list."""

    def read(source, evaluation):
        records = [pair(*((n,) if isinstance(n, int) else n)) for n in rows[source.path]]
        return ListedRecords(records), SourceCounts(
            source.path, read=len(records), records=len(records)
        )

    return read


def load(rows, stage, *, stages=STAGES, seed=1, sources=None, **data):
    named = sources or [SourceConfig(path=path) for path in rows]
    config = RunConfig(data=DataConfig(sources=named, **data), stages=stages, seed=seed)
    return load_stage_data(config, stage, reader(rows))


def text(record):
    return record.messages[0].content


def within(count, total, share):
    """Whether a binomial count lies within 4.5 standard deviations."""
    return abs(count - total * share) <= 4.5 * math.sqrt(total * share * (1 - share)) + 1e-9


# 100 and 10,000 rows: at temperature 2 the shares are as 10 to 100.
@pytest.mark.parametrize(
    ("weights", "temperature", "exhaustion", "expected"),
    [
        ((1, 1), 1, "weights", (1, 1)),
        ((0.3, 2.5), 1, "weights", (0.3, 2.5)),
        ((1, 1), 2, "weights", (10_100 / 110 * 10 / 100, 10_100 / 110 * 100 / 10_000)),
        ((1, 1), 2, "first_exhausted", (1, 0.1)),
        ((1, 1), 2, "all_exhausted", (10, 1)),
        ((2, 1), 1, "first_exhausted", (1, 0.5)),
        ((2, 1), 1, "all_exhausted", (2, 1)),
        ((1, 4), 2, "all_exhausted", (2.5, 1)),  # shares as 10 to 400
        ((1, 1), 1, "once", (1, 1)),
    ],
)
def test_rates_by_hand(weights, temperature, exhaustion, expected):
    found = take_rates(weights, (100, 10_000), temperature, exhaustion)
    assert found == pytest.approx(expected, abs=1e-9)


@settings(derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 10**7), min_size=1, max_size=5),
    data=st.data(),
    temperature=st.floats(0.3, 50),
    exhaustion=st.sampled_from(["weights", "first_exhausted", "all_exhausted"]),
)
def test_shares_are_as_stated(sizes, data, temperature, exhaustion):
    weights = [data.draw(st.floats(0.25, 4)) for _ in sizes]
    rates = take_rates(weights, sizes, temperature, exhaustion)
    full = [i for i, size in enumerate(sizes) if size]
    if not full:
        return
    rows = [rates[i] * sizes[i] for i in full]
    if exhaustion == "weights":
        asked = sum(weights[i] * sizes[i] for i in full)
        assert sum(rows) == pytest.approx(asked, rel=1e-6, abs=0.1)
    else:
        edge = max if exhaustion == "first_exhausted" else min
        assert edge(rates[i] for i in full) == 1
    for i, number in zip(full, rows, strict=True):
        if min(rates[i], rates[full[0]]) < 1e-4:
            continue  # rates are rounded
        log = math.log(weights[i] / weights[full[0]])
        log += math.log(sizes[i] / sizes[full[0]]) / temperature
        assert math.log(number / rows[0]) == pytest.approx(log, abs=1e-4)


@pytest.mark.parametrize("exhaustion", ["weights", "first_exhausted", "all_exhausted", "once"])
def test_rows_come_in_the_shares_asked_for(exhaustion):
    rows = {"small": range(400), "large": range(1000, 7400)}
    temperature = 1 if exhaustion == "once" else 2
    data = load(
        rows, "sft", stages=("sft",), eval_fraction=0.1,
        blend={"temperature": temperature, "exhaustion": exhaustion},
    )  # fmt: skip
    plain = load(rows, "sft", stages=("sft",), eval_fraction=0.1)
    assert [r.uid for r in data.evaluation] == [r.uid for r in plain.evaluation]
    count = dict.fromkeys(rows, 0)
    have = dict(count)
    for record in data.train:
        count["small" if int(text(record)[2:]) < 1000 else "large"] += 1
    for record in plain.train:
        have["small" if int(text(record)[2:]) < 1000 else "large"] += 1
    if exhaustion == "once":
        assert list(data.train) == list(plain.train)
    elif exhaustion == "first_exhausted":
        assert count["small"] == have["small"]
        assert len({r.uid for r in data.train}) == len(data.train)
        rate = math.sqrt(have["small"] / have["large"])
        assert within(count["large"], have["large"], rate)
    elif exhaustion == "all_exhausted":
        assert count["large"] == have["large"]
        rate = math.sqrt(have["large"] / have["small"])
        assert within(count["small"] - 4 * have["small"], have["small"], rate - 4) or rate < 4
        assert len({r.uid for r in data.train}) == len(plain.train)
    else:
        total = sum(have.values())
        share = 1 / (1 + math.sqrt(have["large"] / have["small"]))
        assert abs(sum(count.values()) - total) < 0.05 * total
        assert abs(count["small"] / sum(count.values()) - share) < 0.02
    part = data.counts.stages["sft"]
    assert part.candidates + part.repeated == (part.train + part.evaluation + part.dropped.total())


@settings(max_examples=30, derandomize=True)
@given(order=st.permutations(range(40)), most=st.integers(1, 45))
def test_a_cap_draws_the_same_rows_from_any_order(order, most):
    uids = ListedRecords([pair(i) for i in range(40)]).uids_N
    kept = set(uids[most_rows(uids, most)].tolist())
    assert len(kept) == min(most, 40)
    assert kept == set(uids[order][most_rows(uids[order], most)].tolist())
    assert kept <= set(uids[most_rows(uids, most + 1)].tolist())
    assert most_rows(uids, most).tolist() == sorted(most_rows(uids, most).tolist())
    assert most_rows(uids, None).tolist() == list(range(40))


def test_a_cap_is_not_the_beginning_of_the_file_and_is_counted():
    rows = {"a": range(1000), "b": range(2000, 2100)}
    sources = [SourceConfig(path="a", max_rows=300), SourceConfig(path="b")]
    loaded = {s: load(rows, s, sources=sources, eval_fraction=0.2) for s in STAGES}
    numbers = [int(text(r)[2:]) for d in loaded.values() for r in (*d.train, *d.evaluation)]
    mine = [n for n in numbers if n < 2000]
    assert (len(mine), len(numbers)) == (300, 400)
    assert within(sum(n < 500 for n in mine), 300, 0.5)
    assert loaded["sft"].counts.dropped("sft") == {"beyond the source's max_rows": 700}
    # The rest stays where it was.
    free = {s: load(rows, s, eval_fraction=0.2) for s in STAGES}
    for stage in STAGES:
        assert {r.uid for r in loaded[stage].train} <= {r.uid for r in free[stage].train}


BASE = range(200)
ROWS = st.lists(st.integers(150, 260), min_size=1, max_size=40)
EXTRA = st.lists(
    st.tuples(
        ROWS,
        st.sampled_from([(), ("sft",), ("reward",), ("ppo",), ("sft", "ppo")]),
        st.booleans(),
        st.sampled_from([0.5, 1.0, 2.0]),
    ),
    max_size=3,
)


def named(extra):
    sources, rows = [SourceConfig(path="base")], {"base": list(BASE)}
    for i, (numbers, stages, prompts, weight) in enumerate(extra):
        prompts = prompts and stages in ((), ("ppo",))
        # Answers of their own: a prompt may have several.
        rows[f"x{i}"] = [(n, f"yes {i}") for n in numbers]
        sources.append(
            SourceConfig(path=f"x{i}", stages=stages, prompts_only=prompts, weight=weight)
        )
    return rows, sources


def places(rows, sources, **data):
    """(text of the prompt, answers) -> {(stage, train or evaluation)}."""
    found: dict[object, set[tuple[str, str]]] = {}
    for stage in STAGES:
        one = load(rows, stage, sources=sources, eval_fraction=0.3, **data)
        for side in ("train", "evaluation"):
            for record in getattr(one, side):
                found.setdefault(record, set()).add((stage, side))
    return found


@settings(max_examples=20, deadline=None, derandomize=True)
@given(extra=EXTRA)
def test_a_prompt_is_in_one_stage_and_on_one_side_whatever_is_added(extra):
    rows, sources = named(extra)
    by_prompt: dict[str, set[tuple[str, str]]] = {}
    for record, where in places(rows, sources).items():
        by_prompt.setdefault(text(record), set()).update(where)
    assert all(len(where) == 1 for where in by_prompt.values())
    # Rows of the unrestricted source are all there, and where they were before.
    before = places({"base": list(BASE)}, [SourceConfig(path="base")])
    assert {text(r): w for r, w in before.items()}.items() <= by_prompt.items()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(extra=EXTRA, more=ROWS)
def test_growing_an_unrestricted_source_moves_no_row(extra, more):
    rows, sources = named(extra)
    extra_free = [s for s in sources if not s.only_stages]
    rows = {s.path: rows[s.path] for s in extra_free}
    grown = {path: [*numbers, *more] if path == "base" else numbers
             for path, numbers in rows.items()}  # fmt: skip
    before = places(rows, [s.model_copy(update={"weight": 1.0}) for s in extra_free])
    after = places(grown, [s.model_copy(update={"weight": 1.0}) for s in extra_free])
    # PPO evaluates each prompt once, with whichever record of it comes first.
    by_text = {text(r): w for r, w in after.items()}
    assert all(by_text[text(r)] == where for r, where in before.items())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(extra=EXTRA, data=st.data())
def test_the_order_of_sources_and_rows_changes_nothing(extra, data):
    rows, sources = named(extra)
    other_rows = {path: data.draw(st.permutations(numbers)) for path, numbers in rows.items()}
    other = data.draw(st.permutations(sources))
    blend = {"temperature": 3.0, "exhaustion": "all_exhausted"}
    for stage in STAGES:
        one = load(rows, stage, sources=sources, eval_fraction=0.3, blend=blend)
        two = load(other_rows, stage, sources=other, eval_fraction=0.3, blend=blend)
        assert [r.uid for r in one.train] == [r.uid for r in two.train]
        assert sorted(map(text, one.evaluation)) == sorted(map(text, two.evaluation))


def test_restricted_sources_give_all_they_have_to_their_stages():
    rows = {"base": range(300), "only": range(1000, 1300), "two": range(2000, 2300)}
    sources = [
        SourceConfig(path="base"),
        SourceConfig(path="only", stages=("sft",)),
        SourceConfig(path="two", stages=("sft", "reward")),
    ]
    loaded = {s: load(rows, s, sources=sources) for s in STAGES}
    numbers = {s: [int(text(r)[2:]) for r in (*d.train, *d.evaluation)] for s, d in loaded.items()}
    assert sum(1000 <= n < 2000 for n in numbers["sft"]) == 300
    of_two = [sum(n >= 2000 for n in numbers[s]) for s in STAGES]
    assert of_two[2] == 0
    assert sum(of_two) == 300
    assert within(of_two[0], 300, 1 / 3)  # 2 and 4 of 2,4,4
    shared = {s: load(rows, s, sources=sources, split="shared") for s in STAGES}
    assert [len(d.train) + len(d.evaluation) for d in shared.values()] == [900, 600, 300]


def test_a_stage_without_a_share_lives_on_the_sources_that_name_it():
    rows = {"base": range(300), "only": range(1000, 1100)}
    sources = [SourceConfig(path="base"), SourceConfig(path="only", stages=("sft",))]
    sft = load(rows, "sft", sources=sources, split=(0, 1, 1))
    assert len(sft.train) + len(sft.evaluation) == 100
    alone = load(rows, "sft", sources=sources, split=(0, 1, 1), stages=("sft",))
    assert list(alone.train) == list(sft.train)
    with pytest.raises(ConfigError, match="share 0"):
        load(rows, "sft", sources=sources[:1], split=(0, 1, 1))


def test_a_prompt_of_two_stages_stays_where_it_was_and_the_loss_is_counted():
    rows = {"base": range(300), "only": [(n, "other") for n in range(300)]}
    sources = [SourceConfig(path="base"), SourceConfig(path="only", stages=("sft",))]
    sft = load(rows, "sft", sources=sources)
    alone = load({"base": range(300)}, "sft")
    size = len(alone.train) + len(alone.evaluation)
    assert len(sft.train) + len(sft.evaluation) == 2 * size
    part = sft.counts.stages["sft"]
    lost = "prompt belongs to another stage, which other sources have it for"
    assert part.dropped == {lost: 300 - size}
    assert part.candidates == part.train + part.evaluation + part.dropped.total()


def test_prompts_only_rows_have_no_answers_and_go_to_ppo():
    made = Record(
        (Message("user", "q"),), response="r", chosen="c", rejected="d", margin=1.0,
        uid="f" * 16, ids=TokenIds("t", prompt=(1,), chosen=(2,), rejected=(3,)),
    )  # fmt: skip
    config = RunConfig(
        data=DataConfig(sources=(SourceConfig(path="a", prompts_only=True),), eval_fraction=0.5)
    )
    others = [pair(i) for i in range(40)]

    def read(source, evaluation):
        return ListedRecords([made, *others]), SourceCounts("a")

    ppo = load_stage_data(config, "ppo", read)
    assert len(ppo.train) + len(ppo.evaluation) == 41
    (bare,) = [r for r in (*ppo.train, *ppo.evaluation) if r.uid == "f" * 16]
    assert bare == Record(made.messages, uid="f" * 16, ids=TokenIds("t", prompt=(1,)))
    assert all(r.chosen is None and r.uid for r in ppo.train)
    with pytest.raises(ConfigError, match="stage sft has nothing to train on"):
        load_stage_data(config, "sft", read)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sft": [{"path": "a", "stages": ["sft"]}]}, "data.sft: stages and prompts_only belong"),
        ({"eval": [{"path": "a", "prompts_only": True}]}, "data.eval: stages and prompts_only"),
        ({"sources": [{"path": "a", "prompts_only": True, "stages": ["sft"]}]}, "only ppo can use"),
        ({"sources": ["a=2"], "blend": {"exhaustion": "once"}}, "the weight of a has no effect"),
        (
            {"blend": {"exhaustion": "once", "temperature": 2}},
            r"data.blend.temperature has no effect",
        ),
        ({"blend": {"temperature": 0}}, "greater than or equal to 0.2"),
        ({"sources": [{"path": "a", "max_rows": 0}]}, "greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


def test_absurd_repetition_is_refused():
    rows = {"one": [1, 2], "many": range(10, 3000)}
    with pytest.raises(ConfigError, match=r"would repeat rows \d{4} times; .*max_rows"):
        load(
            rows, "sft", stages=("sft",), eval_fraction=0.1,
            blend={"temperature": 1000.0, "exhaustion": "all_exhausted"},
        )  # fmt: skip


def test_a_weight_that_repeats_without_end_is_refused():
    rows = {"a": range(30), "b": range(30, 60)}
    options = {"stages": ("sft",), "eval_fraction": 0.1}
    for weight in (1000, 1e6):
        sources = [SourceConfig(path="a"), SourceConfig(path="b", weight=weight)]
        if weight == 1000:
            assert len(load(rows, "sft", sources=sources, **options).train) > 9000
            continue
        with pytest.raises(ConfigError, match=r"^weight 1e\+06 of b would repeat rows 1000000 t"):
            load(rows, "sft", sources=sources, **options)


CODE = """
import json, sys
from rlhf_app.config.schema import DataConfig, RunConfig, SourceConfig
from data_sources.stage_data import load_stage_data
sources = (SourceConfig(path="a.jsonl", max_rows=150), SourceConfig(path="b.jsonl", weight=1.5))
blend = {"temperature": 2.0, "exhaustion": "all_exhausted"}
config = RunConfig(data=DataConfig(sources=sources, blend=blend, eval_fraction=0.2))
for stage in config.stages:
    data = load_stage_data(config, stage)
    print(*(r.uid for r in data.train), "|", *(r.uid for r in data.evaluation))
"""


def test_every_process_and_rank_blends_alike(tmp_path, repo_root):
    for name, numbers in (("a", range(200)), ("b", range(150, 260))):
        rows = [{"prompt": f"q {i}", "chosen": "y", "rejected": "n"} for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={"PYTHONPATH": str(repo_root), "PYTHONHASHSEED": str(rank), "RANK": str(rank),
                 "WORLD_SIZE": "2"},
        ).stdout
        for rank in range(2)
    }  # fmt: skip
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 3


def key(prompt):
    return prompt_key((Message("user", prompt),))


# Written down before near-duplicates were looked at: splits of finished runs depend on them.
KEYS = {
    "What is  this?\n": "b44450d4387cb745",
    "Gr\u00fc\u00dfe aus K\u00f6ln": "71177c78ba1c3725",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8\u3002": "62e5e55fd5240ef4",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440": "2502df0e3ea20631",
    "\n\nHuman: Hello\n\nAssistant: hi\n\nHuman: bye\n\nAssistant:": "dbc750f89b35f3a1",
    "\u00c9t\u00e9 \u2014 \u201cquoted\u201d \U0001f44d\U0001f3fd": "a8890e1fb1ceeecf",
}


def test_keys_of_ordinary_prompts_stay():
    for prompt, expected in KEYS.items():
        assert key(prompt) == expected
    inner = json.dumps([["user", "what is this?"]])
    by_hand = hashlib.blake2b(json.dumps([inner]).encode(), digest_size=8)
    assert key(" What is\tTHIS? ") == by_hand.hexdigest()


# Not dotless i, which is no case of i, nor letters whose capitals are other letters' capitals.
LETTERS = st.characters(
    min_codepoint=32, max_codepoint=0x1FFF, exclude_categories=["Cn", "Cc", "Co", "Cs"],
    exclude_characters="\u0131\u0130\u0345:",
)  # fmt: skip


@settings(max_examples=300, derandomize=True)
@given(
    prompt=st.text(LETTERS, min_size=1, max_size=25).filter(str.strip),
    spaces=st.sampled_from([" ", "  ", "\n", "\t ", "\u00a0", "\u3000"]),
    form=st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]),
    case=st.sampled_from([str.lower, str.casefold, str.swapcase, str]),
)
def test_near_duplicates_land_together(prompt, spaces, form, case):
    changed = unicodedata.normalize(form, prompt)
    if all(c.isascii() or not c.isalpha() for c in changed):
        changed = case(changed)
    changed = spaces + changed.replace(" ", spaces) + spaces
    assert key(changed) == key(prompt)


def test_cases_of_letters_with_accents():
    for lower in ("\u0390", "\u03b0", "\u00e9", "\u00df", "\u01f0", "\u0439", "\u1e96"):
        forms = {lower, lower.upper(), unicodedata.normalize("NFD", lower)}
        forms |= {unicodedata.normalize("NFD", lower.upper()), lower.upper().lower()}
        assert len({key(f"a {form} b") for form in forms}) == 1, lower
    assert key("caf\u00e9") != key("cafe")  # an accent is another letter
    assert key("\uff28\uff45llo") == key("hello")  # full width
