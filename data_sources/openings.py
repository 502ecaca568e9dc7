"""The prompts of make-pairs: openings that the model writes itself, or prompts out of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from data_sources.identity import digest, prompt_key
from data_sources.records import Message, Record
from rlhf_app.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_app.models.chat_format import ChatFormat

# (prompts as ids, one uid each) -> one list of sampled ids each
SampleIds = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[Sequence[int]]]

_MOST_TRIES = 50


@dataclass(frozen=True, slots=True)
class Opening:
    """A prompt: its ids, BOS included where the tokenizer adds one, and its text without it."""

    ids: tuple[int, ...]
    text: str


def self_openings(
    sample: SampleIds, fmt: ChatFormat, bos_id: int, number: int, batch_size: int
) -> Iterator[Opening]:
    """Yields openings sampled from the model itself, each prompt once.

    An opening whose text does not encode to the sampled ids is drawn again: it would be
    another prompt to whoever reads the text.

    Args:
        sample: continues prompts by a fixed number of tokens.
        fmt: chat format of the model.
        bos_id: where sampling starts.
        number: how many.
        batch_size: how many are sampled at once.

    Raises:
        ConfigError: the model gives too few different openings.
    """
    seen: set[str] = set()
    uids = count()
    for _ in range(_MOST_TRIES * -(-number // batch_size)):
        batch = [next(uids) for _ in range(batch_size)]
        for ids in sample([[bos_id]] * len(batch), batch):
            text = fmt.decode(ids)
            encoded = fmt.prompt_ids([("user", text)], rendered=True)
            key = prompt_key([Message("user", text)])
            # Encoding may put a BOS in front, and nothing else.
            prefix = encoded[: max(len(encoded) - len(ids), 0)]
            if [*prefix, *ids] != encoded or prefix not in ([], [bos_id]) or key in seen:
                continue
            if not text.strip():
                continue
            seen.add(key)
            yield Opening(tuple(encoded), text)
            if len(seen) == number:
                return
    raise ConfigError(
        f"--self-prompts {number}: the model gave only {len(seen)} different openings whose text "
        "encodes to the sampled tokens; ask for fewer, or for longer ones with --prompt-tokens"
    )


def file_openings(path: Path, fmt: ChatFormat, room: int | None) -> tuple[list[Opening], int]:
    """Returns (the file's different prompts, how many were too long).

    The order is fixed by the prompts' hashes, so that a share cut off the end is a random one.

    Args:
        path: a data file of any shape that training reads.
        fmt: chat format that renders them.
        room: most tokens of a prompt; None: any number.

    Raises:
        ConfigError: the file cannot be used, or no prompt fits.
    """
    from data_sources.examples import prompt_examples
    from data_sources.load import load_source
    from rlhf_app.config.schema import SourceConfig
    from rlhf_app.models.tokenizer import tokenizer_hash

    records, _ = load_source(
        SourceConfig(path=str(path)), verbatim=fmt.kind == "plain", max_bad_fraction=0.1
    )
    unique: dict[str, Record] = {}
    for record in records:
        unique.setdefault(prompt_key(record.messages), record)
    ordered = [unique[key] for key in sorted(unique, key=digest)]
    limit = room if room is not None else 1 << 30
    examples, reasons = prompt_examples(ordered, fmt, tokenizer_hash(fmt.tokenizer), limit)
    openings = [
        Opening(tuple(example.input_ids), _without_bos(example.text, fmt)) for example in examples
    ]
    if not openings:
        raise ConfigError(
            f"--prompts {path}: none of its {len(unique)} prompts fits into {limit} tokens; "
            "lower --max-new-tokens"
        )
    return openings, reasons.total()


def _without_bos(text: str, fmt: ChatFormat) -> str:
    """A template may write BOS; whoever encodes the text adds it again."""
    bos = fmt.tokenizer.bos_token
    return text.removeprefix(bos) if bos else text
