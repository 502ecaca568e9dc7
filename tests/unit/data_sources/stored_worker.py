"""Run by `test_stored_examples.py`: `stored_worker.py CACHE`; encodes rows into the cache.

Prints what was encoded by this process, and everything that the examples hold.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data_sources import stored_examples
from data_sources.encodings import SFTEncoding
from data_sources.records import Message, Record
from rlhf_app.models.chat_format import ChatFormat

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)


def chat_format(template: str = TEMPLATE, first: str = ";") -> ChatFormat:
    """One byte a token, and BOS."""
    letters = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c != first]
    fast = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", first, *letters])}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token=";")
    tokenizer.chat_template = template
    return ChatFormat(tokenizer)


def rows(count: int) -> list[Record]:
    """Some of which are too long for 40 tokens, and some for any."""
    return [
        Record(
            (Message("user", f"{i} " + "long " * (i % 5)),),
            response="yes " * (i % 7) if i % 3 else None,
            chosen=f"good {i % 11}",
            rejected=f"bad {i % 2}",
            margin=i / 7,
            uid=f"{i:016x}",
        )
        for i in range(count)
    ]


if __name__ == "__main__":
    encoded = []
    chunks = stored_examples.encoded_chunks

    def slowly(encoding, records, workers):
        for chunk in chunks(encoding, records, workers):
            encoded.append(len(chunk.columns["items"]))
            time.sleep(0.1)
            yield chunk

    stored_examples.encoded_chunks = slowly
    stored_examples.CHUNK_ROWS = 100
    examples = stored_examples.stored_examples(
        rows(1000), SFTEncoding(chat_format(), "", 40, "right"), Path(sys.argv[1]), 1
    )
    told = hashlib.sha256(repr((list(examples), examples.reasons)).encode()).hexdigest()
    print(json.dumps({"encoded": sum(encoded), "told": told}))
