"""Properties of the split: one place for each prompt, whatever comes later, in proportion."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_sources.blend import Weighted, copies, in_order
from data_sources.identity import content_uid, digest, prompt_key, unit_hash
from data_sources.records import Message, Record
from data_sources.split import held_out, stage_of, stage_shares

KEYS = [digest("prompt", str(i)) for i in range(20_000)]


def within(count, total, share):
    """Whether a binomial count lies within 4.5 standard deviations (7e-6 two-sided)."""
    return abs(count - total * share) < 4.5 * math.sqrt(total * share * (1 - share))


@settings(derandomize=True)
@given(
    split=st.tuples(*[st.floats(0, 100, allow_subnormal=False)] * 3).filter(lambda s: sum(s) > 0.1),
    key=st.text(max_size=20),
)
def test_every_prompt_has_exactly_one_stage_with_a_positive_share(split, key):
    shares = stage_shares(split, ("sft", "reward", "ppo"))
    assert math.isclose(sum(shares.values()), 1)
    assert all(share > 0 for share in shares.values())
    assert stage_of(key, shares) in shares


def test_shares_renormalise_over_the_chosen_stages():
    assert stage_shares((2, 4, 4), ("sft", "reward", "ppo")) == pytest.approx(
        {"sft": 0.2, "reward": 0.4, "ppo": 0.4}
    )
    assert stage_shares((2, 4, 4), ("sft", "ppo")) == pytest.approx({"sft": 1 / 3, "ppo": 2 / 3})
    assert stage_shares((2, 0, 4), ("reward",)) == {}
    assert stage_shares((2, 0, 4), ("reward", "ppo")) == {"ppo": 1.0}


def test_proportions_hold_in_expectation():
    shares = stage_shares((2, 4, 4), ("sft", "reward", "ppo"))
    stages = [stage_of(key, shares) for key in KEYS]
    for stage, share in {"sft": 0.2, "reward": 0.4, "ppo": 0.4}.items():
        assert within(stages.count(stage), len(KEYS), share)


def test_held_out_is_independent_of_the_stage():
    shares = stage_shares((2, 4, 4), ("sft", "reward", "ppo"))
    for stage, share in shares.items():
        keys = [key for key in KEYS if stage_of(key, shares) == stage]
        assert within(sum(held_out(key, 0.1) for key in keys), len(keys), 0.1)
        assert within(len(keys), len(KEYS), share)
    assert not any(held_out(key, 0.0) for key in KEYS)


def test_hashes_are_the_published_blake2b():
    # BLAKE2b-64 of the JSON text ["a"], from coreutils: printf '["a"]' | b2sum -l 64
    assert digest("a") == "2757634b7f53cf25"
    assert unit_hash("a") == (int("2757634b7f53cf25", 16) >> 11) / 2**53


@settings(derandomize=True)
@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_digests_differ_for_different_parts(a, b):
    assert (digest(*a) == digest(*b)) == (a == b)


def one(text):
    return (Message("user", text),)


def test_a_prompt_has_one_key_however_it_is_written():
    turns = (Message("user", "Hello there"), Message("assistant", "hi"), Message("user", "bye"))
    rendered = "\n\nHuman: Hello there\n\nAssistant: hi\n\nHuman: bye\n\nAssistant:"
    assert prompt_key(turns) == prompt_key(one(rendered))
    assert prompt_key(one("What is  this?\n")) == prompt_key(one("what is this?"))
    assert prompt_key(one("\uff21")) == prompt_key(one("a"))  # full-width A
    assert prompt_key(one("a")) != prompt_key(one("b"))
    assert prompt_key(one("a")) != prompt_key((Message("system", "a"),))
    assert prompt_key((Message("user", "a"), Message("assistant", "b"))) != prompt_key(one("a b"))


def record(i):
    text = f"row {i}"
    made = Record(one(text), response="r")
    return Record(one(text), response="r", uid=content_uid(made))


def test_uid_depends_on_the_text_alone():
    a = Record(one("q"), chosen="c", rejected="r")
    assert content_uid(a) == content_uid(Record(one("q"), chosen="c", rejected="r", source="x"))
    assert content_uid(a) != content_uid(Record(one("q"), chosen="r", rejected="c"))
    assert content_uid(a) != content_uid(Record(one("q"), response="c", rejected="r"))


@settings(max_examples=20, derandomize=True)
@given(weight=st.floats(0.05, 4), seed=st.integers(0, 5))
def test_weights_repeat_rows_in_proportion(weight, seed):
    records = [record(i) for i in range(2000)]
    counts = [copies(Weighted(r, "", weight), seed) for r in records]
    assert set(counts) <= {math.floor(weight), math.floor(weight) + 1}
    part = weight - math.floor(weight)
    extra = sum(counts) - 2000 * math.floor(weight)
    assert extra == 0 if part == 0 else within(extra, 2000, part)


def test_weight_one_takes_every_row_once_and_seeds_draw_other_rows():
    records = [record(i) for i in range(100)]
    assert {copies(Weighted(r, "", 1.0), 3) for r in records} == {1}
    halves = [[copies(Weighted(r, "", 0.5), seed) for r in records] for seed in (1, 2)]
    assert halves[0] != halves[1]


@settings(max_examples=20, derandomize=True)
@given(st.permutations(list(range(30))), st.integers(0, 3))
def test_order_depends_on_rows_and_seed_only(order, seed):
    plain = in_order([(record(i), c) for i in range(30) for c in range(2)], seed)
    mixed = in_order([(record(i), c) for i in order for c in range(2)], seed)
    assert [r.uid for r in plain] == [r.uid for r in mixed]
    other = in_order([(record(i), c) for i in range(30) for c in range(2)], seed + 1)
    assert [r.uid for r in plain] != [r.uid for r in other]
    # Rows are mixed: the file order is not kept.
    assert [r.messages[0].content for r in plain[:5]] != [f"row {i}" for i in range(5)]
