"""What users reported of templates, BOS, EOS and labels, each as a test with real tokenizers.

Where there is no shared material, with one made here alone: bytes, and as in OPT one id is BOS, EOS
and padding, and comes before every text.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from data_sources.examples import pair_examples, prompt_examples, sft_examples
from data_sources.records import Message, Record
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.tokenizer import load_tokenizer
from stages.sft.batches import collate

CPU = torch.device("cpu")
PLACES = {"opt": "tokenizers/opt", "gpt2": "tokenizers/gpt2", "stories": "models/stories260K"}
# Llama-2's way: the template itself writes BOS. Neither template knows {% generation %}.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROW = Record(
    (Message("user", "hi"), Message("assistant", "yes?"), Message("user", "and now?")),
    response="one two", chosen="one two", rejected="three",
)  # fmt: skip
LIMIT = 100


def make():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE({c: i for i, c in enumerate(["</s>", *letters])}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 0)]
    )
    marks = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "</s>")
    return tf.PreTrainedTokenizerFast(tokenizer_object=fast, **marks)


@pytest.fixture(scope="module")
def load(request):
    """Loads each tokenizer once; gives copies."""
    originals = {"made": make()}

    def one(name, template=None):
        if name not in originals:
            path = request.getfixturevalue("shared_dir") / PLACES[name]
            originals[name] = load_tokenizer(str(path))
        tokenizer = copy.deepcopy(originals[name])
        if template == CHATML:
            tokenizer.add_special_tokens(
                {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
            )
        tokenizer.chat_template = template
        return tokenizer

    return one


def turns(row):
    prompt = [{"role": m.role, "content": m.content} for m in row.messages]
    return [*prompt, {"role": "assistant", "content": row.response}]


def labels_of(tokenizer, records, pad):
    """The labelled ids of each row, as SFT batches them together, and the batch's ids."""
    fmt = ChatFormat(tokenizer)
    rows, _ = sft_examples(records, fmt, "", LIMIT)
    batch = collate(rows, "response", pad, CPU, limit=LIMIT, filler=rows[0])
    both = zip(batch.input_ids_BT, batch.mask_BT, strict=True)
    return [ids[mask].tolist() for ids, mask in both], batch.input_ids_BT.tolist()


@pytest.mark.parametrize("name", ["made", *PLACES])
def test_complaint_trl1623_dse357_peers1_dsc8_the_end_is_one_labelled_token(load, name):
    """trl#1623, #3091, alignment-handbook#127: masked with the padding of the same id, EOS was
    never learnt. DSE#357: written as text, it came in as seven pieces, and prompts were trained."""
    tokenizer = load(name)
    eos = tokenizer.eos_token_id
    records = [Record((Message("user", "hi"),), response=text) for text in ("ok", "it is so")]
    labels, ids = labels_of(tokenizer, records, pad=eos)
    for record, found in zip(records, labels, strict=True):
        assert found[-1] == eos
        assert tokenizer.decode(found[:-1]).strip() == record.response
        if name != "stories":  # SentencePiece writes a blank of its own before a text
            text = tokenizer(" " + record.response, add_special_tokens=False)["input_ids"]
            assert found == [*text, eos]
    assert ids[0][-1] == eos  # padding, of which there is some
    assert len(ids[0]) > len(tokenizer("\n\nHuman: hi\n\nAssistant: ok")["input_ids"]) + 1


@pytest.mark.parametrize(
    ("name", "template"),
    [("made", CHATML), ("gpt2", CHATML), ("opt", CHATML), ("made", INST), ("stories", INST)],
)
def test_complaint_trl3586_peers3_a_template_without_generation_marks(load, name, template):
    """trl#3586: the mask that transformers makes of such a template is 0 everywhere, and nothing
    was trained. Here the answer is what the rendered text has beyond the prompt's."""
    tokenizer = load(name, template)
    theirs = tokenizer.apply_chat_template(
        turns(ROW), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert not any(theirs["assistant_masks"])  # the complaint
    (found,), _ = labels_of(tokenizer, [ROW], pad=0)
    end = "<|im_end|>" if template == CHATML else tokenizer.eos_token
    assert found[-1] == tokenizer.convert_tokens_to_ids(end)
    assert tokenizer.decode(found).strip() == f"one two{end}"


@pytest.mark.parametrize("name", ["made", "opt", "stories"])
def test_complaint_grm6_peers4_every_stage_has_exactly_one_bos(load, name):
    """alignment-handbook#127, GRM#6, reward-bench#164: the template writes BOS, and the tokenizer
    adds one. OPT's BOS is its EOS, which an answer, and here an earlier turn, ends with as well."""
    tokenizer = load(name, INST)
    fmt = ChatFormat(tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(turns(ROW), tokenize=False)
    assert tokenizer(text)["input_ids"][:2] == [bos, bos]  # the complaint
    whole = tokenizer.apply_chat_template(turns(ROW), tokenize=True, return_dict=False)
    (sft,), _ = sft_examples([ROW], fmt, "", LIMIT)
    (pair,), _ = pair_examples([ROW], fmt, "", LIMIT)
    (prompt,), _ = prompt_examples([ROW], fmt, "", LIMIT)
    assert sft.input_ids == pair.chosen.input_ids == whole
    assert prompt.input_ids == whole[: sft.response_start]
    for ids in (whole, pair.rejected.input_ids, prompt.input_ids):
        assert ids[0] == bos != ids[1]
        others = {bos, eos} if bos != eos else {eos}
        ended = ids is not prompt.input_ids
        # BOS, the end of the earlier answer, and this one's.
        assert sum(i in others for i in ids) == 2 + ended
        assert (ids[-1] == eos) == ended


@pytest.mark.parametrize("name", ["made", "opt"])
def test_complaint_peers4_a_template_without_bos_gets_the_tokenizers_once(load, name):
    tokenizer = load(name, CHATML)
    (sft,), _ = sft_examples([ROW], ChatFormat(tokenizer), "", LIMIT)
    whole = tokenizer.apply_chat_template(turns(ROW), tokenize=True, return_dict=False)
    assert whole[0] != tokenizer.bos_token_id
    assert sft.input_ids == [tokenizer.bos_token_id, *whole[: len(sft.input_ids) - 1]]
    assert sft.input_ids.count(tokenizer.bos_token_id) == 1


def test_complaint_identical_pairs_are_dropped_and_counted(load):
    """Chosen and rejected that are the same, or become it as ids, cost ln 2 and teach nothing.

    An answer that starts with a blank is the one without: the format writes a blank itself.
    """
    answers = [("yes", "yes"), ("yes", " yes"), ("yes", "yes "), ("", "yes")]
    rows = [
        Record((Message("user", f"{i}?"),), uid=str(i), chosen=a, rejected=b)
        for i, (a, b) in enumerate(answers)
    ]
    pairs, reasons = pair_examples(rows, ChatFormat(load("made")), "", LIMIT)
    assert [pair.uid for pair in pairs] == ["2", "3"]
    assert reasons == {"chosen and rejected are identical": 2}
