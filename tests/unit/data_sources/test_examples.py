"""Records to ids: what is cut, dropped, counted, and taken as sampled."""

import copy

import pytest

from data_sources.examples import pair_examples, prompt_examples, sft_examples
from data_sources.records import Message, Record, TokenIds
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.tokenizer import load_tokenizer

INST = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content }}{{ eos_token }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(shared_dir):
    return load_tokenizer(str(shared_dir / "tokenizers" / "gpt2"))  # pad is EOS


@pytest.fixture(scope="module")
def fmt(tokenizer):
    return ChatFormat(tokenizer)


def record(prompt="hi", **fields):
    return Record((Message("user", prompt),), uid=prompt, **fields)


def test_sft_takes_the_response_before_the_chosen_answer(fmt, tokenizer):
    rows = [record("a", response="yes", chosen="no", rejected="x"), record("b", chosen="no")]
    examples, reasons = sft_examples(rows, fmt, "", 100)
    texts = [tokenizer.decode(e.input_ids) for e in examples]
    assert texts == [
        "\n\nHuman: a\n\nAssistant: yes<|endoftext|>",
        "\n\nHuman: b\n\nAssistant: no<|endoftext|>",
    ]
    answers = [tokenizer.decode(e.input_ids[e.response_start :]) for e in examples]
    assert answers == [" yes<|endoftext|>", " no<|endoftext|>"]
    assert [e.uid for e in examples] == ["a", "b"]
    assert not reasons


def test_the_end_token_is_in_the_answer_once_even_where_pad_is_eos(fmt, tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    (example,), _ = sft_examples([record(response="one two three")], fmt, "", 100)
    answer = example.input_ids[example.response_start :]
    assert answer.count(tokenizer.eos_token_id) == 1
    assert answer[-1] == tokenizer.eos_token_id


def test_complaint_peers2_long_answers_are_cut_and_prompts_without_room_dropped(fmt, tokenizer):
    row = record(response="one two three four")
    (whole,), _ = sft_examples([row], fmt, "", 100)
    size, start = len(whole.input_ids), whole.response_start
    (fits,), reasons = sft_examples([row], fmt, "", size)
    assert (fits.truncated, reasons) == (False, {})
    (cut,), reasons = sft_examples([row], fmt, "", size - 1)
    assert (cut.truncated, reasons) == (True, {"answer truncated (kept)": 1})
    assert cut.input_ids == whole.input_ids[:-1]
    assert tokenizer.eos_token_id not in cut.input_ids[start:]
    (last,), _ = sft_examples([row], fmt, "", start + 1)
    assert len(last.input_ids) == start + 1
    assert sft_examples([row], fmt, "", start) == ([], {"prompt fills the length limit": 1})


def test_rows_without_what_a_stage_needs_are_counted(fmt):
    rows = [record(), record(chosen="a")]
    assert sft_examples(rows, fmt, "", 99)[1] == {"no answer to imitate": 1}
    assert pair_examples(rows, fmt, "", 99) == ([], {"no pair of answers": 2})
    assert len(prompt_examples(rows, fmt, "", 99)[0]) == 2


def test_pairs_share_the_prompt_and_drop_identical_and_long_ones(fmt):
    good = record("a", chosen="yes", rejected="no", margin=0.5)
    rows = [
        good,
        record("b", chosen="yes", rejected=" yes"),
        record("c", chosen="d " * 99, rejected="e"),
    ]
    (pair,), reasons = pair_examples(rows, fmt, "", 50)
    assert reasons == {"chosen and rejected are identical": 1, "pair longer than the limit": 1}
    start = pair.chosen.response_start
    assert pair.chosen.input_ids[:start] == pair.rejected.input_ids[:start]
    assert start == pair.rejected.response_start
    assert pair.margin == 0.5
    assert pair_examples([record(chosen="a", rejected="b")], fmt, "", 50)[0][0].margin == 0.0
    limit = len(pair.chosen.input_ids)
    assert len(pair_examples([good], fmt, "", limit)[0]) == 1
    assert not pair_examples([good], fmt, "", limit - 1)[0]


def test_prompts_equal_the_prompt_part_of_an_answer(fmt):
    row = record("hello", response="yes")
    (prompt,), _ = prompt_examples([row], fmt, "", 50)
    (example,), _ = sft_examples([row], fmt, "", 50)
    assert prompt.input_ids == example.input_ids[: example.response_start]
    assert prompt.text == "\n\nHuman: hello\n\nAssistant:"
    assert prompt.record is row
    size = len(prompt.input_ids)
    assert len(prompt_examples([row, row], fmt, "", size)[0]) == 2  # repeats are kept
    assert prompt_examples([row], fmt, "", size - 1) == ([], {"prompt fills the length limit": 1})


IDS = TokenIds("mine", prompt=(5, 6), chosen=(7, 8), rejected=(9, 50256))


def test_sampled_ids_are_used_as_they_are_by_the_same_tokenizer(fmt):
    row = record("text", chosen="x", rejected="y", rendered=True, ids=IDS)
    (pair,), _ = pair_examples([row], fmt, "mine", 50)
    # No end token is added to an answer that was cut, and none is taken from the other.
    assert pair.chosen.input_ids == [5, 6, 7, 8]
    assert pair.rejected.input_ids == [5, 6, 9, 50256]
    assert pair.chosen.response_start == pair.rejected.response_start == 2
    (example,), _ = sft_examples([row], fmt, "mine", 50)
    assert example.input_ids == [5, 6, 7, 8]
    (prompt,), _ = prompt_examples([row], fmt, "mine", 50)
    assert (prompt.input_ids, prompt.text) == ([5, 6], "text")


def test_sampled_text_is_encoded_for_another_tokenizer(fmt, tokenizer):
    row = record("\n\nHuman: q\n\nAssistant:", chosen=" x", rejected=" y", rendered=True, ids=IDS)
    (pair,), _ = pair_examples([row], fmt, "other", 50)
    assert tokenizer.decode(pair.chosen.input_ids) == "\n\nHuman: q\n\nAssistant: x<|endoftext|>"
    (prompt,), _ = prompt_examples([row], fmt, "other", 50)
    assert tokenizer.decode(prompt.input_ids) == "\n\nHuman: q\n\nAssistant:"


def test_turns_that_the_template_refuses_are_counted_not_fatal(tokenizer):
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = INST
    fmt = ChatFormat(templated)
    tools = Record(
        (Message("user", "a"), Message("tool", "b")), response="c", chosen="c", rejected="d"
    )
    reason = {"the chat template refuses the turns": 1}
    assert sft_examples([tools], fmt, "", 50) == ([], reason)
    assert pair_examples([tools], fmt, "", 50) == ([], reason)
    assert prompt_examples([tools], fmt, "", 50) == ([], reason)
