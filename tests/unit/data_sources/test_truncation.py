"""Rows beyond their limit, under each policy: what is kept, what is counted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data_sources.examples import pair_examples, prompt_examples, sft_examples, target_spans
from data_sources.records import Message, Record
from data_sources.truncation import clipped, cut_left, most_turns, moved, without_oldest_turns
from rlhf_app.config.data import DataConfig
from rlhf_app.models.chat_format import ChatFormat

POLICIES = ("drop", "left", "right", "keep_last_turns")
# One letter a token, a token a mark: lengths can be counted by hand.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)


@pytest.fixture(scope="module")
def fmt():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", ";", *letters[1:]])}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token=";")
    tokenizer.chat_template = TEMPLATE
    return ChatFormat(tokenizer)


def row(*contents, **answers):
    roles = ("system", "user", "assistant")
    messages = tuple(
        Message(next(r for r in roles if r[0] == c[0]), c[1:])
        for c in contents
    )  # fmt: skip
    return Record(messages, uid="u", **(answers or {"response": "x"}))


def shown(fmt, ids):
    return fmt.tokenizer.decode(ids)


LONG = row("sS", "uone", "ayes", "utwo", response="no")
WHOLE = "<s>SS;Uone;Ayes;Utwo;Ano;"  # 1 + 3 + 5 + 5 + 5 + 4 = 23 tokens


@pytest.mark.parametrize(
    ("policy", "limit", "text", "reason"),
    [
        ("drop", 23, WHOLE, None),
        ("drop", 22, None, "row longer than the limit"),
        ("right", 22, WHOLE[:-1], "answer truncated (kept)"),
        ("right", 21, WHOLE[:-2], "answer truncated (kept)"),
        ("right", 20, None, "prompt fills the length limit"),
        ("left", 22, "<s>" + WHOLE[4:], "prompt cut at its start (kept)"),
        ("left", 5, "<s>A" + "no;", "prompt cut at its start (kept)"),
        ("left", 4, None, "answer leaves the prompt no room"),
        ("keep_last_turns", 22, "<s>SS;Utwo;Ano;", "oldest turns left out (kept)"),
        ("keep_last_turns", 13, "<s>SS;Utwo;Ano;", "oldest turns left out (kept)"),
        ("keep_last_turns", 12, None, "last turn alone longer than the limit"),
    ],
)
def test_sft_by_hand(fmt, policy, limit, text, reason):
    assert len(sft_examples([LONG], fmt, "", 99)[0][0].input_ids) == 23
    examples, reasons = sft_examples([LONG], fmt, "", limit, truncation=policy)
    assert [shown(fmt, e.input_ids) for e in examples] == ([text] if text else [])
    assert reasons == ({reason: 1} if reason else {})
    for example in examples:
        answer = shown(fmt, example.input_ids[example.response_start :])
        assert answer == "no;"[: len(answer)]
        assert example.truncated == (policy == "right" and limit < 23)


@pytest.mark.parametrize(
    ("policy", "limit", "earlier"),
    [
        ("right", 22, ["yes;"]),
        ("right", 12, ["ye"]),  # the last answer is gone, and this turn still teaches
        ("left", 22, ["yes;"]),
        ("left", 14, ["yes;"]),  # the cut is right before this turn
        ("left", 13, []),  # and here inside it: without its beginning it is no example
        ("keep_last_turns", 22, []),
    ],
)
def test_loss_follows_the_cut(fmt, policy, limit, earlier):
    ((example,), _) = sft_examples([LONG], fmt, "", limit, truncation=policy, every_turn=True)
    last = ["no;"[: max(0, limit - 20)]] if policy == "right" else ["no;"]
    spans = target_spans(example, "assistant_turns")
    found = [shown(fmt, example.input_ids[a:b]) for a, b in spans]
    assert found == [*earlier, *filter(None, last)]
    assert len(example.input_ids) <= limit


def test_a_row_without_any_loss_is_dropped(fmt):
    examples, reasons = sft_examples([LONG], fmt, "", 10, truncation="right", every_turn=True)
    assert (examples, reasons) == ([], {"prompt fills the length limit": 1})


START_CUT, END_CUT = "prompt cut at its start (kept)", "answer truncated (kept)"
PAIR = row("uone", "ayes", "utwo", chosen="abc", rejected="abd")


@pytest.mark.parametrize(
    ("policy", "limit", "texts", "reason"),
    [
        ("drop", 20, None, "pair longer than the limit"),
        ("left", 20, ["<s>one;Ayes;Utwo;Aabc;", "<s>one;Ayes;Utwo;Aabd;"], START_CUT),
        ("left", 5, None, "answer leaves the prompt no room"),
        ("right", 20, ["<s>Uone;Ayes;Utwo;Aabc", "<s>Uone;Ayes;Utwo;Aabd"], END_CUT),
        ("right", 19, None, "chosen and rejected are identical"),
        ("right", 17, None, "prompt fills the length limit"),
        ("keep_last_turns", 20, ["<s>Utwo;Aabc;", "<s>Utwo;Aabd;"], "oldest turns left out (kept)"),
        ("keep_last_turns", 10, None, "last turn alone longer than the limit"),
    ],
)  # fmt: skip
def test_pairs_by_hand(fmt, policy, limit, texts, reason):
    pairs, reasons = pair_examples([PAIR], fmt, "", limit, truncation=policy)
    found = [[shown(fmt, s.input_ids) for s in (p.chosen, p.rejected)] for p in pairs]
    assert found == ([texts] if texts else [])
    assert reasons == {reason: 1}


def test_answers_of_a_pair_keep_one_prompt_when_one_of_them_is_long(fmt):
    pair = row("u" + "q" * 30, chosen="a", rejected="b" * 10)
    ((found,), _) = pair_examples([pair], fmt, "", 20, truncation="left")
    start = found.chosen.response_start
    assert found.chosen.input_ids[:start] == found.rejected.input_ids[:start]
    assert len(found.rejected.input_ids) == 20


@pytest.mark.parametrize(
    ("policy", "limit", "text", "reason"),
    [
        ("drop", 15, None, "prompt fills the length limit"),
        ("left", 15, "ne;Ayes;Utwo;A", "prompt cut at its start (kept)"),
        ("right", 15, "Uone;Ayes;Utwo", "prompt cut at its end (kept)"),
        ("keep_last_turns", 15, "Utwo;A", "oldest turns left out (kept)"),
        ("keep_last_turns", 6, None, "last turn alone longer than the limit"),
    ],
)
def test_prompts_by_hand(fmt, policy, limit, text, reason):
    prompts, reasons = prompt_examples([PAIR], fmt, "", limit, truncation=policy)
    assert [shown(fmt, p.input_ids) for p in prompts] == (["<s>" + text] if text else [])
    assert [p.text for p in prompts] == ([text] if text else [])
    assert reasons == {reason: 1}
    if policy == "keep_last_turns" and prompts:
        # Whoever renders the prompt again, a reward model with its own template, sees the same.
        assert prompts[0].record.messages == (Message("user", "two"),)


TURN = st.tuples(st.sampled_from("ua"), st.text("xyz", min_size=1, max_size=6)).map("".join)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    turns=st.lists(TURN, max_size=8),
    system=st.booleans(),
    last=st.text("xyz", min_size=1, max_size=6),
    answers=st.tuples(*[st.text("xyz", max_size=9)] * 2),
    limit=st.integers(2, 40),
    policy=st.sampled_from(POLICIES),
)
def test_any_row_fits_or_is_counted(fmt, turns, system, last, answers, limit, policy):
    contents = [*(["sS"] if system else []), *turns, "u" + last]
    record = row(*contents, chosen=answers[0], rejected=answers[1])
    sft, lost = sft_examples([record], fmt, "", limit, truncation=policy, every_turn=True)
    whole = sft_examples([record], fmt, "", 999, every_turn=True)[0][0]
    assert len(sft) + sum(n for why, n in lost.items() if "(kept)" not in why) == 1
    for example in sft:
        assert len(example.input_ids) <= limit
        assert example.input_ids[0] == 0 != example.input_ids[-2]  # BOS, once
        assert example.input_ids.count(0) == 1
        spans = target_spans(example, "assistant_turns")
        assert spans
        if policy != "right":  # whole turns: each labelled end token once, none lost
            assert all(example.input_ids[b - 1] in fmt.stop_ids for _, b in spans)
        assert sum(b - a for a, b in spans) <= len(example.input_ids) - 1
        if len(whole.input_ids) <= limit:
            assert (example, lost) == (whole, {})
    pairs, lost = pair_examples([record], fmt, "", limit, truncation=policy)
    assert len(pairs) + sum(n for why, n in lost.items() if "(kept)" not in why) == 1
    for pair in pairs:
        start = pair.chosen.response_start
        assert pair.chosen.input_ids[:start] == pair.rejected.input_ids[:start]
        assert max(len(pair.chosen.input_ids), len(pair.rejected.input_ids)) <= limit
        assert pair.chosen.input_ids != pair.rejected.input_ids
    prompts, lost = prompt_examples([record], fmt, "", limit, truncation=policy)
    assert len(prompts) + sum(n for why, n in lost.items() if "(kept)" not in why) == 1
    assert all(1 <= len(p.input_ids) <= limit for p in prompts)


def test_most_turns_is_the_first_choice_that_fits():
    messages = [Message("user" if i % 2 == 0 else "assistant", str(i)) for i in range(9)]
    choices = without_oldest_turns(messages)
    assert [len(c) for c in choices] == [9, 7, 5, 3, 1]
    for limit in range(10):
        expected = next((c for c in choices[1:] if len(c) <= limit), None)
        found = most_turns(messages, lambda c: c, lambda c, limit=limit: len(c) <= limit)
        assert (found and found[0]) == expected


def test_cuts_of_lists():
    assert cut_left([9, 1, 2, 3], 3, [9]) == [9, 2, 3]
    assert cut_left([1, 2, 3], 2, [9]) == [2, 3]
    assert cut_left([9, 1, 2], 1, [9]) is None
    assert cut_left([1, 2], 0, []) is None
    assert moved([(1, 3), (4, 6)], 2, 1) == ((2, 4),)
    assert clipped([(1, 3), (4, 6), (6, 7)], 5) == ((1, 3), (4, 5))


def test_defaults_are_those_of_old_and_impossible_settings_are_refused():
    kept = DataConfig().truncation
    assert (kept.sft, kept.reward, kept.ppo) == ("right", "drop", "drop")
    with pytest.raises(
        ValueError, match=r"data\.truncation\.ppo = right would cut off the question"
    ):
        DataConfig(truncation={"ppo": "right"})
    assert DataConfig(truncation={"ppo": "right"}, chat_format="plain")
    with pytest.raises(ValueError, match=r"data\.chat_template has no effect"):
        DataConfig(chat_template="x.jinja", chat_format="plain")
