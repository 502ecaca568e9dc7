"""Text to ids: one BOS, one end token, boundaries by offsets; Hugging Face as the reference."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_format import ChatFormat, UnsupportedTurns
from rlhf_app.models.tokenizer import load_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Llama-2's: BOS in the template, a blank before the answer and one before EOS; no system turn.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}"
    "{% endif %}{% endfor %}"
)
PLACES = {
    "opt": "tokenizers/opt",
    "gpt2": "tokenizers/gpt2",
    "stories": "models/stories260K",
}
TALK = [("system", "Be brief."), ("user", "hi"), ("assistant", "yes?"), ("user", "What is 2+2?")]


@pytest.fixture(scope="session")
def load(shared_dir):
    """Loads each tokenizer once; those that a test changes are copies of it."""
    originals = {}

    def one(name, template=None, change=False):
        if name not in originals:
            originals[name] = load_tokenizer(str(shared_dir / PLACES[name]))
        if not (template or change):
            return originals[name]
        tokenizer = copy.deepcopy(originals[name])
        if template == CHATML:
            tokenizer.add_special_tokens(
                {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
            )
        if template:
            tokenizer.chat_template = template
        return tokenizer

    return one


def as_dicts(messages):
    return [{"role": role, "content": content} for role, content in messages]


def test_human_assistant_text_is_hh_rlhf_and_rm_static(load):
    fmt = ChatFormat(load("opt"))
    assert fmt.kind == "human_assistant"
    assert fmt.prompt_text(TALK) == (
        "Be brief.\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: What is 2+2?\n\nAssistant:"
    )


@pytest.mark.parametrize("name", PLACES)
def test_an_answer_is_the_text_encoded_at_once_with_one_bos_and_one_eos(load, name):
    tokenizer = load(name)
    fmt = ChatFormat(tokenizer)
    encoded = fmt.encode([("user", "hi")], "Sure, ok")
    # Hugging Face's own encoding adds BOS where the tokenizer has one.
    whole = tokenizer("\n\nHuman: hi\n\nAssistant: Sure, ok")["input_ids"]
    assert encoded.ids == [*whole, tokenizer.eos_token_id]
    assert fmt.prompt_ids([("user", "hi")]) == encoded.ids[: encoded.response_start]
    assert fmt.decode(encoded.ids[encoded.response_start :]).strip() == "Sure, ok"


@pytest.mark.parametrize("kind", ["human_assistant", "plain"])
@pytest.mark.parametrize("name", PLACES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompt=st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=30),
    response=st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=30),
)
def test_one_bos_one_eos_and_a_sound_boundary_for_any_text(load, name, kind, prompt, response):
    tokenizer = load(name)
    fmt = ChatFormat(tokenizer, kind)
    encoded = fmt.encode([("user", prompt)], response)
    context, answer = encoded.ids[: encoded.response_start], encoded.ids[encoded.response_start :]
    assert [i for i, token in enumerate(answer) if token in fmt.stop_ids] == [len(answer) - 1]
    has_bos = name != "gpt2"
    assert context.count(tokenizer.bos_token_id) == int(has_bos)
    assert context[:1] == [tokenizer.bos_token_id] or not has_bos
    # Turn marks keep the prompt's tokens apart from the answer's; within a word the answer may
    # change how the prompt's last characters are cut ("AA" + "L" is "A", "AL" in GPT-2).
    if kind == "human_assistant":
        assert fmt.prompt_ids([("user", prompt)]) == context
    # No character of the answer is lost, but a blank that SentencePiece decoding drops.
    text = tokenizer.decode(encoded.ids, skip_special_tokens=True).replace(" ", "")
    assert text.endswith(response.replace(" ", ""))


@pytest.mark.parametrize("name", ["opt", "gpt2"])
@settings(max_examples=200, deadline=None, derandomize=True)
@given(prompt=st.text("ab AL.\n1", min_size=1), response=st.text("ab AL.\n1", min_size=1))
def test_the_answer_starts_with_the_first_token_past_the_prompt(load, name, prompt, response):
    """The boundary by decoding (exact for byte-level BPE) instead of offsets."""
    tokenizer = load(name)
    encoded = ChatFormat(tokenizer, "plain").encode([("user", prompt)], response)

    def text(ids):
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    start = encoded.response_start
    assert text(encoded.ids) == prompt + response
    assert len(text(encoded.ids[:start])) <= len(prompt) < len(text(encoded.ids[: start + 1]))


def test_a_straddling_token_belongs_to_the_answer(load):
    tokenizer = load("gpt2")
    fmt = ChatFormat(tokenizer, "plain")
    # " world" is one token that starts with the prompt's last blank.
    encoded = fmt.encode([("user", "Hello ")], "world")
    assert tokenizer.convert_ids_to_tokens(encoded.ids) == ["Hello", "Ġworld", "<|endoftext|>"]
    assert encoded.response_start == 1


@pytest.mark.parametrize("name", PLACES)
def test_an_empty_answer_is_the_end_token_alone(load, name):
    for kind in ("human_assistant", "plain"):
        fmt = ChatFormat(load(name), kind)
        encoded = fmt.encode([("user", "hi")], "")
        assert encoded.ids == [*fmt.prompt_ids([("user", "hi")]), fmt.end_id]
        assert encoded.response_start == len(encoded.ids) - 1


def test_the_end_is_looked_for_in_the_answer_only(load):
    fmt = ChatFormat(load("opt"))  # BOS is EOS is 2
    encoded = fmt.encode([("user", "hi")], "ok")
    assert (encoded.ids[0], encoded.ids[-1]) == (2, 2)
    assert encoded.ids.count(2) == 2


@pytest.mark.parametrize("name", ["opt", "stories"])
def test_an_answer_ends_at_its_first_stop(load, name):
    fmt = ChatFormat(load(name))
    cut = fmt.encode([("user", "hi")], "ok</s> and more</s>")
    assert cut == fmt.encode([("user", "hi")], "ok")


@pytest.mark.parametrize("name", PLACES)
def test_chatml_equals_hugging_face_up_to_the_end_of_turn(load, name):
    tokenizer = load(name, CHATML)
    fmt = ChatFormat(tokenizer, extra_stop_ids=(tokenizer.eos_token_id,))
    assert fmt.kind == "template"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert fmt.stop_ids == (tokenizer.eos_token_id, end)
    assert fmt.end_id == end

    bos = [] if name == "gpt2" else [tokenizer.bos_token_id]
    prompt = tokenizer.apply_chat_template(
        as_dicts(TALK), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert fmt.prompt_ids(TALK) == bos + prompt
    encoded = fmt.encode(TALK, "It is 4.")
    whole = tokenizer.apply_chat_template(
        as_dicts([*TALK, ("assistant", "It is 4.")]), tokenize=True, return_dict=False
    )
    last = len(whole) - 1 - whole[::-1].index(end)
    assert encoded.ids == bos + whole[: last + 1]  # without ChatML's newline
    assert encoded.response_start == len(bos + prompt)


def test_complaint_peers4_a_template_that_writes_bos_gets_no_second_one(load):
    tokenizer = load("stories", INST)
    fmt = ChatFormat(tokenizer)
    messages = [("user", "hi")]
    encoded = fmt.encode(messages, "ok")
    whole = tokenizer.apply_chat_template(
        as_dicts([*messages, ("assistant", "ok")]), tokenize=True, return_dict=False
    )
    assert encoded.ids == whole
    assert whole.count(tokenizer.bos_token_id) == whole.count(tokenizer.eos_token_id) == 1
    assert fmt.end_id == tokenizer.eos_token_id
    assert fmt.prompt_ids(messages) == encoded.ids[: encoded.response_start]


def test_a_system_turn_joins_the_user_where_the_template_has_none(load):
    fmt = ChatFormat(load("stories", INST))
    assert fmt.prompt_text([("system", "Be brief."), ("user", "hi")]) == (
        "<s>[INST] Be brief.\n\nhi [/INST]"
    )


def test_a_template_that_drops_the_system_turn_is_noticed(load):
    silent = INST.replace(
        "{{ raise_exception('Only user and assistant roles are supported') }}", ""
    )
    fmt = ChatFormat(load("stories", silent))
    assert "Be brief." in fmt.prompt_text([("system", "Be brief."), ("user", "hi")])


def test_refused_turns_raise_for_the_row(load):
    fmt = ChatFormat(load("stories", INST))
    with pytest.raises(UnsupportedTurns, match="Only user and assistant"):
        fmt.prompt_text([("user", "a"), ("tool", "b"), ("user", "c")])


def test_a_template_without_an_end_token_gets_eos(load):
    plain_words = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    plain_words += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = load("gpt2", plain_words)
    fmt = ChatFormat(tokenizer)
    encoded = fmt.encode([("user", "hi")], "ok")
    assert encoded.ids == [*tokenizer("user: hi\nassistant: ok")["input_ids"], 50256]


def test_rendered_prompts_are_continued_as_they_stand(load):
    fmt = ChatFormat(load("opt"))
    text = "\n\nHuman: hi\n\nAssistant:"
    messages = [("user", text)]
    assert fmt.prompt_text(messages, rendered=True) == text
    assert fmt.encode(messages, " ok", rendered=True) == fmt.encode([("user", "hi")], "ok")
    assert fmt.prompt_ids(messages, rendered=True) == fmt.prompt_ids([("user", "hi")])


def test_plain_joins_turns_and_adds_nothing(load):
    fmt = ChatFormat(load("gpt2"), "plain")
    assert fmt.prompt_text([("system", "a"), ("user", "b ")]) == "a\n\nb "


def test_impossible_formats_are_errors(load):
    with pytest.raises(ConfigError, match="no chat template"):
        ChatFormat(load("gpt2"), "template")
    tokenizer = load("gpt2", "{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="does not write assistant turns"):
        ChatFormat(tokenizer)
    tokenizer = load("gpt2", change=True)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no EOS token"):
        ChatFormat(tokenizer)
    assert ChatFormat(tokenizer, extra_stop_ids=(7,)).end_id == 7
