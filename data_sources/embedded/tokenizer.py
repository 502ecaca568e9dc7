"""The embedded task's tokenizer: one token for each word and mark, text and ids one to one.

Words carry their leading space (GPT-2's byte-level convention), so that decoding joins tokens
back into the very same text. A word outside the task becomes <unk>.
"""

from __future__ import annotations

import string
from pathlib import Path

from data_sources.embedded import words
from data_sources.embedded.grammar import QUESTIONS, SENTENCES

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
_SPECIAL = (PAD, BOS, EOS, UNK)
_SLOTS: dict[str, tuple[str, ...]] = {
    "first": words.THINGS,
    "second": words.THINGS,
    "thing": words.THINGS,
    "adjective": (*words.KIND_ADJECTIVES, *words.PLAIN_ADJECTIVES, *words.HARSH_ADJECTIVES),
    "verb": tuple(v for v, _ in (*words.KIND_VERBS, *words.PLAIN_VERBS, *words.HARSH_VERBS)),
    "verbs": tuple(v for _, v in (*words.KIND_VERBS, *words.PLAIN_VERBS, *words.HARSH_VERBS)),
    "person": words.PEOPLE,
    "time": words.TIMES,
}


def build_tokenizer(directory: Path) -> int:
    """Writes the tokenizer in Hugging Face form; encoding puts <bos> in front.

    Args:
        directory: where `AutoTokenizer.from_pretrained` will find it.

    Returns:
        The number of tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = {piece for text in _texts() for piece, _ in split.pre_tokenize_str(text)}
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *sorted(pieces)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    return len(vocabulary)


def _texts() -> list[str]:
    """Every template with every word that can stand in its slots, alone and after a space."""
    texts = []
    for template in (*QUESTIONS, *SENTENCES):
        slots = {name for _, name, _, _ in string.Formatter().parse(template) if name}
        first = {slot: _SLOTS[slot][0] for slot in slots}
        for slot in slots:
            for word in _SLOTS[slot]:
                text = template.format(**{**first, slot: word})
                texts += [text, f" {text}"]
    return texts
