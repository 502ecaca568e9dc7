"""Hashes that name rows and prompts: the same on every rank, machine and Python version."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data_sources.records import Message, Record
from data_sources.transcripts import parse_turns

_SPACE = re.compile(r"\s+")
#: Rows of which Python objects exist at a time.
_CHUNK = 1 << 16


def digest(*parts: str) -> str:
    """Returns 16 hex digits of BLAKE2b over the parts; ("ab", "c") and ("a", "bc") differ."""
    text = json.dumps(parts, ensure_ascii=True)
    return hashlib.blake2b(text.encode("ascii"), digest_size=8).hexdigest()


def unit_hash(*parts: str) -> float:
    """Returns a number in [0, 1) that depends on the parts alone.

    Only the top 53 bits are used: all 64 could round up to 1.0.
    """
    return (int(digest(*parts), 16) >> 11) / 2**53


def unit_hashes(
    numbers_N: NDArray[np.uint64], *before: str, after: Sequence[str] = ()
) -> NDArray[np.float64]:
    """Returns `unit_hash(*before, digits, *after)` of many rows.

    Args:
        numbers_N: uint64; a part of 16 hexadecimal digits each, as a number.
        *before: parts in front of it, the same for all rows.
        after: parts behind it, the same for all rows.
    """
    head = (json.dumps(before)[:-1] + ', "').encode("ascii")
    tail = ('"' + "".join(f", {json.dumps(part)}" for part in after) + "]").encode("ascii")
    hash_of, found_N = hashlib.blake2b, np.empty(len(numbers_N), dtype=np.float64)
    for start in range(0, len(numbers_N), _CHUNK):
        digests = b"".join(
            hash_of(b"%b%016x%b" % (head, number, tail), digest_size=8).digest()
            for number in numbers_N[start : start + _CHUNK].tolist()
        )
        # See unit_hash: 53 bits, which a float holds exactly.
        found_N[start : start + _CHUNK] = (np.frombuffer(digests, dtype=">u8") >> 11) / 2**53
    return found_N


def content_uid(record: Record) -> str:
    """Returns the uid of a record: a hash of its text, whatever source or file it came from."""
    return digest(
        json.dumps([[m.role, m.content] for m in record.messages]),
        json.dumps([record.response, record.chosen, record.rejected]),
    )


def _caseless(text: str) -> str:
    """Folds case.

    A few letters fold into letter and accents (Greek iota with dialytika and tonos), their capitals
    into less: composed in between, both fold alike.
    """
    return unicodedata.normalize("NFKC", text.casefold()).casefold()


def prompt_key(messages: Sequence[Message]) -> str:
    """Returns what decides where a prompt goes: its turns without case, spacing and Unicode forms.

    A prompt given as one string with `\\n\\nHuman:` turns, or rendered that way by an earlier
    stage, has the same key as the same prompt given as messages: it lands in the same split.
    """
    turns: Sequence[Message] = messages
    if len(messages) == 1:
        parsed = parse_turns(messages[0].content)
        turns = parsed if parsed is not None else messages
    flat = [
        [m.role, _caseless(_SPACE.sub(" ", unicodedata.normalize("NFKC", m.content)).strip())]
        for m in turns
        if m.content.strip()
    ]
    return digest(json.dumps(flat))
