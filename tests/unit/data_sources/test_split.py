"""Properties of the split: one place for each prompt, whatever comes later, in proportion."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_sources.blend import copies, in_order
from data_sources.identity import content_uid, digest, prompt_key, unit_hash
from data_sources.records import Message, Record
from data_sources.split import are_held_out, held_out, stage_shares, stages_of
from rlhf_app.config.schema import STAGES

KEYS = [digest("prompt", str(i)) for i in range(20_000)]


def numbers(digits):
    """Uids or keys as tables keep them."""
    return np.array([int(text, 16) for text in digits], dtype=np.uint64)


def stage_of(key, shares):
    return STAGES[stages_of(numbers([key]), shares)[0]]


def within(count, total, share):
    """Whether a binomial count lies within 4.5 standard deviations (7e-6 two-sided)."""
    return abs(count - total * share) < 4.5 * math.sqrt(total * share * (1 - share))


@settings(derandomize=True)
@given(
    split=st.tuples(*[st.floats(0, 100, allow_subnormal=False)] * 3).filter(lambda s: sum(s) > 0.1),
    key=st.integers(0, 2**64 - 1).map("{:016x}".format),
)
def test_every_prompt_has_exactly_one_stage_with_a_positive_share(split, key):
    shares = stage_shares(split, ("sft", "reward", "ppo"))
    assert math.isclose(sum(shares.values()), 1)
    assert all(share > 0 for share in shares.values())
    # The first share that reaches the hash of the key; rounding must not lose the last one.
    position, upper = unit_hash("stage", key), 0.0
    ends = [(upper := upper + share, name) for name, share in shares.items()]
    expected = next((name for upper, name in ends if position < upper), ends[-1][1])
    assert stage_of(key, shares) == expected


def test_shares_renormalise_over_the_chosen_stages():
    assert stage_shares((2, 4, 4), ("sft", "reward", "ppo")) == pytest.approx(
        {"sft": 0.2, "reward": 0.4, "ppo": 0.4}
    )
    assert stage_shares((2, 4, 4), ("sft", "ppo")) == pytest.approx({"sft": 1 / 3, "ppo": 2 / 3})
    assert stage_shares((2, 0, 4), ("reward",)) == {}
    assert stage_shares((2, 0, 4), ("reward", "ppo")) == {"ppo": 1.0}


def test_proportions_hold_in_expectation():
    shares = stage_shares((2, 4, 4), ("sft", "reward", "ppo"))
    stages = stages_of(numbers(KEYS), shares).tolist()
    for stage, share in {"sft": 0.2, "reward": 0.4, "ppo": 0.4}.items():
        assert within(stages.count(STAGES.index(stage)), len(KEYS), share)


def test_held_out_is_independent_of_the_stage():
    shares = stage_shares((2, 4, 4), ("sft", "reward", "ppo"))
    for stage, share in shares.items():
        mine = stages_of(numbers(KEYS), shares) == STAGES.index(stage)
        keys = [key for key, is_mine in zip(KEYS, mine, strict=True) if is_mine]
        held = [held_out(key, 0.1) for key in keys]
        assert are_held_out(numbers(keys), 0.1).tolist() == held
        assert within(sum(held), len(keys), 0.1)
        assert within(len(keys), len(KEYS), share)
    assert not are_held_out(numbers(KEYS), 0.0).any()


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


UIDS = numbers([record(i).uid for i in range(2000)])


@settings(max_examples=20, derandomize=True)
@given(weight=st.floats(0.05, 4), seed=st.integers(0, 5))
def test_weights_repeat_rows_in_proportion(weight, seed):
    counts = copies(UIDS, weight, seed).tolist()
    assert set(counts) <= {math.floor(weight), math.floor(weight) + 1}
    part = weight - math.floor(weight)
    extra = sum(counts) - 2000 * math.floor(weight)
    assert extra == 0 if part == 0 else within(extra, 2000, part)


def test_weight_one_takes_every_row_once_and_seeds_draw_other_rows():
    assert set(copies(UIDS, 1.0, 3).tolist()) == {1}
    halves = [copies(UIDS, 0.5, seed).tolist() for seed in (1, 2)]
    assert halves[0] != halves[1]


@settings(max_examples=20, derandomize=True)
@given(st.permutations(list(range(30))), st.integers(0, 3))
def test_order_depends_on_rows_and_seed_only(order, seed):
    twice = np.full(30, 2)
    plain = UIDS[in_order(UIDS[:30], twice, seed)].tolist()
    mixed = UIDS[order][in_order(UIDS[order], twice, seed)].tolist()
    assert plain == mixed
    assert sorted(plain) == sorted([*UIDS[:30].tolist(), *UIDS[:30].tolist()])
    assert plain != UIDS[in_order(UIDS[:30], twice, seed + 1)].tolist()
    # Rows are mixed: the file order is not kept.
    assert plain[:5] != UIDS[:5].tolist()
