"""Earlier assistant turns: their tokens against transformers' own mask, marks against prefixes."""

from __future__ import annotations

import copy

import pytest
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from data_sources.examples import sft_examples
from data_sources.records import Message, Record
from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_format import ChatFormat, UnsupportedTurns
from rlhf_app.models.tokenizer import load_tokenizer

PLACES = {"opt": "tokenizers/opt", "gpt2": "tokenizers/gpt2", "stories": "models/stories260K"}
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MARKED_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + ASK
)
# The system's words inside the first user turn; the template writes BOS.
MARKED_LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set words = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first and words %}"
    "<<SYS>>\n{{ words }}\n<</SYS>>\n\n{% endif %}{{ m.content }} [/INST]{% else %}"
    "{% generation %} {{ m.content }} {{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
# Contents are stripped, and a system turn is refused.
MARKED_STRIPS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% if m.role == 'assistant' %}"
    "<start>model\n{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}"
    "{{ '\n' }}{% else %}<start>{{ m.role }}\n{{ m.content | trim }}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start>model\n{% endif %}"
)
TEMPLATES = {"chatml": MARKED_CHATML, "llama2": MARKED_LLAMA2, "strips": MARKED_STRIPS}
TALK = [
    ("system", "Be brief."), ("user", "hi"), ("assistant", "yes? no."), ("user", "2+2?"),
    ("assistant", "4"), ("user", "and 3+3?"),
]  # fmt: skip
ANSWER = "It is 6."


def unmarked(template):
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


CHATML = unmarked(MARKED_CHATML)


def made():
    """Bytes; as in OPT one id is BOS, EOS and padding."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE({c: i for i, c in enumerate(["</s>", *letters])}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 0)]
    )
    marks = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "</s>")
    return tf.PreTrainedTokenizerFast(tokenizer_object=fast, **marks)


ORIGINALS: dict[str, object] = {}


@pytest.fixture(scope="module")
def load(request):
    def one(name, template=None):
        if name not in ORIGINALS:
            if name == "made":
                ORIGINALS[name] = made()
            else:
                path = request.getfixturevalue("shared_dir") / PLACES[name]
                ORIGINALS[name] = load_tokenizer(str(path))
        tokenizer = copy.deepcopy(ORIGINALS[name])
        if template and "<|im_" in template:
            tokenizer.add_special_tokens(
                {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
            )
        tokenizer.chat_template = template
        return tokenizer

    return one


@pytest.fixture(scope="module")
def formats(load):
    """With marks and without, on bytes."""
    return {
        which: [ChatFormat(load("made", one)) for one in (template, unmarked(template))]
        for which, template in TEMPLATES.items()
    }


def as_dicts(turns):
    return [{"role": role, "content": content} for role, content in turns]


def without_system(template, turns):
    if template != MARKED_STRIPS or turns[0][0] != "system":
        return turns
    (_, words), (_, first), *rest = turns
    return [("user", f"{words}\n\n{first}"), *rest]


def theirs(tokenizer, template, turns):
    """transformers' ids and mask of the conversation, with one BOS, to the last end token."""
    found = tokenizer.apply_chat_template(
        as_dicts(without_system(template, turns)), chat_template=template,
        tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
    )  # fmt: skip
    ids, mask = found["input_ids"], found["assistant_masks"]
    bos = tokenizer("a")["input_ids"][: -len(tokenizer("a", add_special_tokens=False)["input_ids"])]
    if ids[: len(bos)] != bos:
        ids, mask = [*bos, *ids], [0] * len(bos) + mask
    last = max(i for i, marked in enumerate(mask) if marked)
    return ids[: last + 1], mask[: last + 1]


def ours(fmt, turns, answer):
    encoded = fmt.encode(turns, answer, every_turn=True)
    mask = [0] * len(encoded.ids)
    for first, end in [*encoded.earlier, (encoded.response_start, len(mask))]:
        for place in range(first, end):
            mask[place] += 1  # twice would show
    return encoded.ids, mask


def stops_labelled(fmt, ids, mask):
    return sum(m for i, m in zip(ids, mask, strict=True) if i in fmt.stop_ids)


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "prefixes"])
@pytest.mark.parametrize("which", TEMPLATES)
@pytest.mark.parametrize("name", ["made", *PLACES])
def test_labels_are_those_of_transformers(load, name, which, marks):
    """The template with marks is the reference; without them the prefixes must say the same."""
    template = TEMPLATES[which]
    tokenizer = load(name, template if marks else unmarked(template))
    ids, mask = theirs(tokenizer, template, [*TALK, ("assistant", ANSWER)])
    assert ours(ChatFormat(tokenizer), TALK, ANSWER) == (ids, mask)
    assert stops_labelled(ChatFormat(tokenizer), ids, mask) == 3
    assert sum(mask) > 3


CONTENT = st.text("ab \n.Aé1", min_size=1, max_size=12).filter(str.strip)


@pytest.mark.parametrize("which", TEMPLATES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(contents=st.lists(CONTENT, min_size=2, max_size=8), system=st.none() | CONTENT)
def test_labels_of_any_conversation(formats, which, contents, system):
    contents = contents[: len(contents) // 2 * 2]
    turns = [("user" if i % 2 == 0 else "assistant", c) for i, c in enumerate(contents)]
    turns = [*([("system", system)] if system else []), *turns]
    # Not the answer: a blank at its start would be the template's lead.
    turns[-1] = ("assistant", turns[-1][1].strip())
    marked, by_prefix = formats[which]
    expected = theirs(marked.tokenizer, TEMPLATES[which], turns)
    assert ours(marked, turns[:-1], turns[-1][1]) == expected
    assert ours(by_prefix, turns[:-1], turns[-1][1]) == expected
    assert stops_labelled(marked, *expected) == len(contents) // 2


def test_an_end_token_outside_the_marks_is_labelled_too(load):
    """Many templates on the Hub mark the words alone; nothing would learn to stop."""
    outside = MARKED_CHATML.replace(
        "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
    )
    tokenizer = load("made", outside)
    assert ours(ChatFormat(tokenizer), TALK, ANSWER) == theirs(
        tokenizer, MARKED_CHATML, [*TALK, ("assistant", ANSWER)]
    )


def test_turns_by_name_have_no_end_token_before_the_last(load):
    tokenizer = load("gpt2")
    ids, mask = ours(ChatFormat(tokenizer), TALK, ANSWER)
    labelled = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert labelled == " yes? no. 4 It is 6.<|endoftext|>"
    fmt = ChatFormat(tokenizer, "plain")
    encoded = fmt.encode(TALK, ANSWER, every_turn=True)
    parts = [tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.earlier]
    assert parts == ["yes? no.", "4"]


def test_a_template_without_end_tokens_labels_the_words(load):
    words = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = load("gpt2", words + "{% if add_generation_prompt %}assistant: {% endif %}")
    encoded = ChatFormat(tokenizer).encode(TALK, ANSWER, every_turn=True)
    assert [tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.earlier] == [" yes? no.", " 4"]


def test_a_turn_ends_at_its_first_stop(load):
    tokenizer = load("made", CHATML)
    talk = [("user", "hi"), ("assistant", "a<|im_end|>b"), ("user", "q")]
    encoded = ChatFormat(tokenizer).encode(talk, "c", every_turn=True)
    ((first, last),) = encoded.earlier
    assert tokenizer.decode(encoded.ids[first:last]) == "a<|im_end|>"


def test_only_answers_count_and_only_when_asked_for(load):
    tokenizer = load("made", CHATML)
    fmt = ChatFormat(tokenizer)
    greeted = [("assistant", "Welcome"), ("user", "hi"), ("assistant", "yes"), ("user", "q")]
    encoded = fmt.encode(greeted, "c", every_turn=True)
    assert [tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.earlier] == ["yes<|im_end|>"]
    assert fmt.encode(greeted, "c").earlier == ()
    rendered = fmt.prompt_text(greeted)
    assert fmt.encode([("user", rendered)], "c", rendered=True, every_turn=True).earlier == ()


def test_tool_turns_are_kept_without_loss(load):
    talk = [("user", "rain?"), ("assistant", "call"), ("tool", "wet"), ("user", "so?")]
    tokenizer = load("made", CHATML)
    ids, mask = ours(ChatFormat(tokenizer), talk, "take one")
    assert "<|im_start|>tool\nwet<|im_end|>" in tokenizer.decode(ids)
    labelled = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert labelled == "call<|im_end|>take one<|im_end|>"
    assert "\n\nTool: wet\n\n" in ChatFormat(load("made")).prompt_text(talk)


def test_a_template_that_drops_tool_turns_drops_the_row(load):
    silent = CHATML.replace("messages %}", "messages if m.role != 'tool' %}")
    fmt = ChatFormat(load("made", silent))
    assert fmt.prompt_text([("user", "a")])
    with pytest.raises(UnsupportedTurns, match="leaves tool turns out"):
        fmt.prompt_text([("user", "a"), ("assistant", "b"), ("tool", "c")])


def row(*turns, response="c"):
    return Record(tuple(Message(*turn) for turn in turns), response=response)


REWRITES = {
    # The whole ends with EOS, so that no shorter rendering is the beginning of a longer one.
    "ends": CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
    "numbers": CHATML.replace("{{ m.role }}", "{{ m.role }}{{ messages | length }}"),
}


@pytest.mark.parametrize("which", REWRITES)
def test_a_template_whose_prefixes_do_not_nest_is_named(load, tmp_path, which):
    file = tmp_path / "mine.jinja"
    file.write_text(REWRITES[which])
    tokenizer = load("made")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fmt = ChatFormat(tokenizer, template_file=str(file))
    rows = [row(("user", "q"), ("assistant", "a"), ("user", "r"))]
    assert len(sft_examples(rows, fmt, "", 500)[0]) == 1  # the last answer is known
    with pytest.raises(ConfigError, match=r"chat template .*mine\.jinja rewrites earlier turns"):
        sft_examples(rows, fmt, "", 500, every_turn=True)


def test_rows_whose_earlier_turns_are_rewritten_are_counted(load):
    """As Qwen3's: the reasoning of earlier answers goes."""
    forgets = CHATML.replace(
        "{{ m.content }}<|im_end|>{{ '\n' }}{% else",
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% else",
    )
    fmt = ChatFormat(load("made", forgets))
    plain = row(("user", "q"), ("assistant", "a"), ("user", "r"))
    thinks = row(("user", "q"), ("assistant", "<think>x</think>a"), ("user", "r"))
    examples, reasons = sft_examples([plain, thinks], fmt, "", 500, every_turn=True)
    assert len(examples) == 1
    assert reasons == {"the chat template rewrites earlier turns": 1}


def test_a_template_by_file_is_saved_with_the_tokenizer(load, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(MARKED_LLAMA2, encoding="utf-8")
    tokenizer = load("made")
    fmt = ChatFormat(tokenizer, template_file=str(file))
    assert fmt.kind == "template"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = ChatFormat(load_tokenizer(str(tmp_path / "saved")))
    expected = theirs(load("made", MARKED_LLAMA2), MARKED_LLAMA2, [*TALK, ("assistant", ANSWER)])[0]
    for one in (fmt, again):
        assert one.encode(TALK, ANSWER).ids == expected
