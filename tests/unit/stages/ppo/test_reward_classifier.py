"""Classifiers as rewards against plain transformers, one row at a time, without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.errors import ConfigError
from rlhf_app.training.micro_batches import BatchLimit
from stages.ppo.reward_sources.classifier import ClassifierReward, log_odds
from stages.ppo.reward_sources.texts import TextAnswers

WORDS = ("what", "is", "good", "bad", "very", "a", "b", "c", "user", "bot", ":")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[U] ' if m.role == 'user' else '[B] ' }}"
    "{{ m.content }}{{ eos_token }}{% endfor %}"
)


def tokenizer(path: Path, *, bert: bool, pad: str | None, template: str | None = None) -> Any:
    marks = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[U]", "[B]", "</s>"]
    vocabulary = {word: index for index, word in enumerate([*marks, *WORDS])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special: dict[str, str] = {"unk_token": "[UNK]", "eos_token": "</s>"}
    if bert:
        fast.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )  # fmt: skip
        special |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        special |= {"bos_token": "[CLS]"}
    if pad is not None:
        special["pad_token"] = pad
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=fast,
        additional_special_tokens=["[U]", "[B]"],
        model_input_names=["input_ids", "attention_mask"] + ["token_type_ids"] * bert,
        **special,
    )
    made.chat_template = template
    made.save_pretrained(path)
    return made


def save(path: Path, family: str, labels: int, *, template: str | None = None, **more: Any) -> Path:
    torch.manual_seed(labels)
    common: dict[str, Any] = {
        "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "initializer_range": 0.5, "num_labels": labels,
        "pad_token_id": 3,
    }  # fmt: skip
    common |= {"max_position_embeddings": 16} | more
    if family == "bert":
        # Dropout that must be off.
        config = tf.BertConfig(**common, hidden_dropout_prob=0.5, classifier_dropout=0.5)
        tf.BertForSequenceClassification(config).save_pretrained(path)
    else:
        config = tf.LlamaConfig(**common, num_key_value_heads=1, eos_token_id=6, bos_token_id=1)
        tf.LlamaForSequenceClassification(config).save_pretrained(path)
    pad = {3: "[PAD]", 6: "</s>", None: None}[common["pad_token_id"]]
    tokenizer(path, bert=family == "bert", pad=pad, template=template)
    return path


def load(path: Path, rows: int = 8, **how: Any) -> ClassifierReward:
    how = {"limit": BatchLimit(rows), "dtype": torch.float32} | how
    return ClassifierReward(str(path), device=torch.device("cpu"), **how)


def answers(*pairs: tuple[str, str], rendered: bool = False) -> TextAnswers:
    """Prompts as the actor sees them: `user: ... bot:` around the user's turn."""
    prompts = [
        PromptExample(
            str(i),
            [1],
            question if rendered else f"user : {question} bot :",
            Record((Message("user", question),), rendered=rendered),
        )
        for i, (question, _) in enumerate(pairs)
    ]
    return TextAnswers(prompts, [answer for _, answer in pairs])


PAIRS = [
    ("what is a", " good"), ("is b", " very very bad a b"), ("a", ""), ("what", " c very good a b"),
]  # fmt: skip


@torch.no_grad()
def plain(path: Path, *texts: str, **how: Any) -> torch.Tensor:
    """Logits of one row as transformers computes them, dropout off."""
    model = tf.AutoModelForSequenceClassification.from_pretrained(path).eval()
    row = tf.AutoTokenizer.from_pretrained(path)(*texts, return_tensors="pt", **how)
    return model(**row).logits[0]


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_bert_with_three_labels_reads_text_pairs(tmp_path, rows):
    labels = {0: "bad", 1: "neutral", 2: "good"}
    path = save(tmp_path, "bert", 3, id2label=labels, label2id={v: k for k, v in labels.items()})
    expected = []
    for question, answer in PAIRS:
        p = plain(path, question, answer).double().softmax(0)[2]
        expected.append((p / (1 - p)).log().item())
    for label in ("good", "GOOD", 2):
        found = load(path, rows, label=label)(answers(*PAIRS))
        assert found.tolist() == pytest.approx(expected, abs=1e-4)
    again = load(path, rows, label="good")(answers(*reversed(PAIRS)))
    assert again.tolist() == pytest.approx(expected[::-1], abs=1e-4)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_llama_with_one_label_reads_one_text(tmp_path, rows):
    path = save(tmp_path, "llama", 1)
    expected = [plain(path, f"user : {q} bot :{a}").item() for q, a in PAIRS]
    found = load(path, rows)(answers(*PAIRS))
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert found.dtype == torch.float32


def test_its_own_chat_template_is_used(tmp_path):
    path = save(tmp_path, "llama", 1, template=TEMPLATE)
    expected = [
        plain(path, f"[CLS][U] {q}</s>[B] {a.strip()}</s>", add_special_tokens=False).item()
        for q, a in PAIRS
    ]
    assert load(path)(answers(*PAIRS)).tolist() == pytest.approx(expected, abs=1e-5)
    # A prompt that is plain text has no turns to put into it.
    rendered = [plain(path, q + a).item() for q, a in PAIRS]
    found = load(path)(answers(*PAIRS, rendered=True))
    assert found.tolist() == pytest.approx(rendered, abs=1e-5)
    as_text = [plain(path, f"user : {q} bot :{a}").item() for q, a in PAIRS]
    assert load(path, input="text")(answers(*PAIRS)).tolist() == pytest.approx(as_text, abs=1e-5)


def test_text_that_is_continued_is_one_text_for_a_bert_too(tmp_path):
    path = save(tmp_path, "bert", 1)
    expected = [plain(path, q + a).item() for q, a in PAIRS]
    reward = load(path, continues_text=True)
    found = reward(answers(*PAIRS, rendered=True))
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pad", [3, 6, None])
def test_complaint_peers9_a_score_does_not_depend_on_padding_or_neighbours(tmp_path, pad):
    """Also where padding is EOS, which ends each row, and where a model knows no padding at all."""
    path = save(tmp_path, "llama", 1, template=TEMPLATE, pad_token_id=pad)
    expected = [
        plain(path, f"[CLS][U] {q}</s>[B] {a.strip()}</s>", add_special_tokens=False).item()
        for q, a in PAIRS
    ]
    assert len(set(expected)) == len(PAIRS)
    for order in ([0, 1, 2, 3], [3, 1], [2], [1, 2, 0]):
        for side in ("left", "right"):
            reward = load(path)
            reward._tokenizer.padding_side = side
            found = reward(answers(*(PAIRS[i] for i in order)))
            assert found.tolist() == pytest.approx([expected[i] for i in order], abs=1e-5)


@pytest.mark.parametrize("rows", [2, 8])
def test_a_batch_that_uses_the_whole_vocabulary_of_a_model_without_padding(tmp_path, rows):
    """18 ids: no one is left that could stand for padding."""
    path = save(tmp_path, "llama", 1, pad_token_id=None, vocab_size=18)
    pairs = [
        ("what is good bad very", " [UNK] [CLS] [SEP] [PAD]"), ("a b c", " [U] [B] </s>"),
        ("what", " a"), ("b", " c"),
    ]  # fmt: skip
    expected = [plain(path, f"user : {q} bot :{a}").item() for q, a in pairs]
    assert len(set(expected)) == len(pairs)
    assert load(path, rows)(answers(*pairs)).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_what_is_too_long_loses_its_beginning_and_is_counted(tmp_path, family):
    path = save(tmp_path, family, 1)  # 16 positions
    question = "a b c is what very good bad a b c a"
    found, bert = load(path), family == "bert"
    text = f"user : {question} bot :"
    scores = found(answers((question, " good bad"), ("a", " b")))
    # [CLS] and two [SEP] leave 13 words, of which there are 14; the one text has 18.
    if bert:
        expected = plain(path, question.removeprefix("a "), "good bad")
    else:
        kept = f"{text} good bad".removeprefix("user : ")
        expected = plain(path, kept, add_special_tokens=False)
    assert scores[0].item() == pytest.approx(expected.item(), abs=1e-5)
    assert found.truncated == 1
    # An answer that is too long by itself loses its own beginning.
    endless = " ".join(["very"] * 20 + ["bad"])
    scores = found(answers(("a", f" {endless}")))
    if bert:
        expected = plain(path, "", " ".join(endless.split()[-13:]))
    else:
        expected = plain(path, " ".join(endless.split()[-16:]), add_special_tokens=False)
    assert scores.item() == pytest.approx(expected.item(), abs=1e-5)
    assert found.truncated == 2


def test_roberta_positions_start_behind_the_padding_id(tmp_path):
    config = tf.RobertaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, num_labels=1, pad_token_id=3,
    )  # fmt: skip
    tf.RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer(tmp_path, bert=True, pad="[PAD]")
    reward = load(tmp_path)
    assert torch.isfinite(reward(answers(("a " * 20, " good")))).all()
    assert reward.truncated == 1


def test_weights_are_frozen_and_dropout_is_off(tmp_path):
    reward = load(save(tmp_path, "bert", 1))
    model = reward._model
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    model.train()  # even so
    assert torch.equal(reward(answers(*PAIRS)), reward(answers(*PAIRS)))


def test_log_odds_by_hand():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    # p_2 = e^2 / (1 + e + e^2); log-odds = 2 - log(1 + e).
    assert log_odds(logits, 2).item() == pytest.approx(2 - 1.3132616875, abs=1e-6)
    assert log_odds(logits[:, :2], 1).item() == 1.0  # of two: the difference
    assert log_odds(logits, 2, exclusive=False).item() == 2.0
    assert log_odds(logits[:, :1], 0).item() == 0.0


@pytest.mark.parametrize(
    ("labels", "how", "message"),
    [
        (2, {}, "has 2 labels (0 LABEL_0, 1 LABEL_1); set label to the one that is good"),
        (2, {"label": "good"}, "no label good; it has 0 LABEL_0, 1 LABEL_1"),
        (2, {"label": 2}, "no label 2; it has"),
        (1, {"label": 1}, "no label 1; it has 0 LABEL_0"),
        (1, {"input": "template"}, "its tokenizer has no chat template; use auto or text"),
        (1, {"input": "pair"}, "its tokenizer has no separator token; use auto or text"),
    ],
)
def test_what_a_classifier_does_not_have_is_named(tmp_path, labels, how, message):
    path = save(tmp_path, "llama", labels)
    with pytest.raises(ConfigError) as caught:
        load(path, **how)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_complaint_peers11_a_head_that_is_not_there_is_an_error(tmp_path):
    """Transformers would make a new one, whose scores mean nothing."""
    config = tf.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=3,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer(tmp_path, bert=False, pad="[PAD]")
    with pytest.raises(ConfigError, match=r"1 weights are not in the checkpoint \(score.weight"):
        load(tmp_path, label=0)


def test_a_template_that_refuses_names_the_prompt(tmp_path):
    path = save(tmp_path, "llama", 1, template="{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match="prompt 0 cannot be written in the chat template"):
        load(path)(answers(*PAIRS))
