"""Raw row -> canonical records, one pure function per shape of prompts, answers and pairs.

Every function takes (row, columns, verbatim): the raw row, the column that plays each part,
and whether texts stay exactly as they are (the plain chat format) or are read as turns and
stripped. It returns what the row holds, or raises `RowError` with the reason to count.
Scored and ranked answers are in `data_sources.ranked`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from data_sources.fields import (
    Row,
    RowError,
    answer_of,
    encodable,
    is_turn,
    number_of,
    optional_text,
    text_of,
    turns_of,
)
from data_sources.records import Message, Record, TokenIds
from data_sources.transcripts import ASSISTANT_MARK, merge_turns, parse_turns, split_transcripts

Columns = Mapping[str, str]

UNDESIRABLE = "answer labelled undesirable: prompt only"
UNANSWERED = "conversation ends without an answer: prompt only"
TOOLS_UNSEEN = "tools column is not shown to the model"

# Ids are kept as int32.
_HIGHEST_ID = 2**31 - 1
# Differences of log-odds are a few units; a larger number is another scale or a broken row.
MOST_MARGIN = 1e6
# Characters of a prompt from which on answers that begin with it are taken to repeat it.
SHORTEST_REPEATED = 20


@dataclass(frozen=True, slots=True)
class Normalised:
    """Records of one row (source and uid still empty), and remarks to count."""

    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's turns, and the start of the answer where the text already holds one."""

    messages: tuple[Message, ...]
    prefix: str = ""

    def answer(self, text: str, verbatim: bool) -> str:
        """Returns the whole answer, of which `text` is the continuation."""
        return text if verbatim else (self.prefix + text).strip()


def prompt_of(row: Row, columns: Columns, verbatim: bool) -> Prompt:
    r"""Returns the row's prompt from its system, history, prompt and input columns.

    A prompt string with `\n\nHuman:` turns becomes those turns, unless `verbatim`.
    """
    column = columns["prompt"]
    value = row.get(column)
    system = optional_text(row, columns.get("system"))
    before = [Message("system", system)] if system.strip() else []
    before += _history(row, columns)
    prompt = _written_prompt(value, row, columns, verbatim)
    if before and prompt.messages[0].role == "system" and before[0].role == "system":
        before = before[1:]
    if not before:
        return prompt
    return Prompt(merge_turns([*before, *prompt.messages]), prompt.prefix)


def _written_prompt(value: object, row: Row, columns: Columns, verbatim: bool) -> Prompt:
    column = columns["prompt"]
    if isinstance(value, list) or is_turn(value):
        return _open_prompt(turns_of(value, column), column)
    text = text_of(row, column)
    extra = optional_text(row, columns.get("input"))
    if extra.strip():
        text = f"{text}\n{extra}" if verbatim else f"{text.strip()}\n{extra.strip()}"
    if not text.strip():
        raise RowError(f"{column} is empty")
    if verbatim:
        return Prompt((Message("user", text),))
    turns = parse_turns(text)
    if turns is None:
        return Prompt((Message("user", text.strip()),))
    return _open_prompt(turns, column)


def _open_prompt(turns: tuple[Message, ...], column: str) -> Prompt:
    """Takes a final assistant turn off the prompt: it is the start of the answer."""
    prefix = ""
    if turns and turns[-1].role == "assistant":
        prefix, turns = turns[-1].content, turns[:-1]
    if not any(message.role == "user" for message in turns):
        raise RowError(f"{column} has no user turn")
    return Prompt(turns, prefix)


def _history(row: Row, columns: Columns) -> list[Message]:
    """Earlier (question, answer) pairs, as LLaMA-Factory's Alpaca files have them."""
    pairs = row.get(columns["history"]) if "history" in columns else None
    if pairs and not isinstance(pairs, (list, tuple)):
        raise RowError("history is not a list of [question, answer]", type(pairs).__name__)
    messages: list[Message] = []
    for pair in pairs or []:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowError("history is not a list of [question, answer]")
        question, answer = (encodable(str(text), "history") for text in pair)
        messages += [Message("user", question), Message("assistant", answer)]
    return messages


def prompt_only(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """{prompt}: a question for PPO."""
    prompt = prompt_of(row, columns, verbatim)
    if prompt.prefix:
        raise RowError(f"{columns['prompt']} ends inside an answer")
    return Normalised((Record(prompt.messages),))


def prompt_response(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """{prompt, response} and Alpaca's {instruction, input, output}, with KTO's label or not.

    The response is a text, one assistant turn, or a list of equally good texts.
    """
    prompt = prompt_of(row, columns, verbatim)
    column = columns["response"]
    value = row.get(column)
    if isinstance(value, list) and value and isinstance(value[0], str):
        # Several answers of equal standing (HC3): the first.
        answer = answer_of({column: value[0]}, column)
    elif isinstance(value, list) or is_turn(value):
        answer = _only_answer(turns_of(value, column), column)
    else:
        answer = answer_of(row, column)
    if _undesirable(row, columns):
        return Normalised((Record(prompt.messages),), (UNDESIRABLE,))
    return Normalised((Record(prompt.messages, response=prompt.answer(answer, verbatim)),))


def _undesirable(row: Row, columns: Columns) -> bool:
    """Whether KTO's label says that the answer is a bad one: not something to imitate."""
    value = row.get(columns["label"]) if "label" in columns else None
    return value is False or (isinstance(value, str) and value.strip().lower() == "false")


def _only_answer(turns: tuple[Message, ...], column: str) -> str:
    if len(turns) != 1 or turns[0].role != "assistant":
        roles = ", ".join(turn.role for turn in turns)
        raise RowError(f"{column} is not one assistant turn", roles)
    return turns[0].content


def conversation(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """{messages} or ShareGPT's {conversations}: the last assistant turn is the answer."""
    column = columns["messages"]
    turns = turns_of(row.get(column), column)
    system = optional_text(row, columns.get("system"))
    if system.strip() and turns and turns[0].role != "system":
        turns = merge_turns([Message("system", system), *turns])
    if not any(turn.role == "user" for turn in turns):
        raise RowError(f"{column} has no user turn")
    notes = (TOOLS_UNSEEN,) if row.get("tools") else ()
    if turns[-1].role != "assistant":
        return Normalised((Record(turns),), (*notes, UNANSWERED))
    prompt, answer = turns[:-1], turns[-1].content
    if not any(turn.role == "user" for turn in prompt):
        raise RowError(f"{column} has no user turn before the answer")
    if _undesirable(row, columns):
        return Normalised((Record(prompt),), (*notes, UNDESIRABLE))
    return Normalised((Record(prompt, response=answer),), notes)


def preference(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """{prompt or messages, chosen, rejected}, answers as strings, turns or whole conversations."""
    if "prompt" in columns:
        prompt = prompt_of(row, columns, verbatim)
    else:
        column = columns["messages"]
        turns = turns_of(row.get(column), column)
        system = optional_text(row, columns.get("system"))
        if system.strip() and turns and turns[0].role != "system":
            turns = merge_turns([Message("system", system), *turns])
        prompt = _open_prompt(turns, column)
    values = (row.get(columns["chosen"]), row.get(columns["rejected"]))
    if all(isinstance(value, list) or is_turn(value) for value in values):
        prompt, chosen, rejected = _answers_in_turns(row, columns, prompt)
    else:
        chosen, rejected = (answer_of(row, columns[side]) for side in ("chosen", "rejected"))
        written = row.get(columns.get("prompt", ""))
        if _repeated(written, chosen, rejected):
            chosen, rejected = chosen[len(written) :], rejected[len(written) :]
            if not (chosen.strip() and rejected.strip()):
                raise RowError("an answer only repeats the prompt")
        chosen, rejected = (prompt.answer(text, verbatim) for text in (chosen, rejected))
    record = Record(prompt.messages, chosen=chosen, rejected=rejected, margin=_margin(row))
    if "response" in columns and optional_text(row, columns["response"]).strip():
        response = prompt.answer(text_of(row, columns["response"]), verbatim)
        record = replace(record, response=response)
    return Normalised((record,))


def _repeated(prompt: object, chosen: str, rejected: str) -> TypeGuard[str]:
    """Whether both answers are the whole text, prompt and answer.

    Two answers to "Hi" may well begin with "Hi"; with a longer prompt that is no accident.
    """
    if not isinstance(prompt, str) or len(prompt.strip()) < SHORTEST_REPEATED:
        return False
    return chosen.startswith(prompt) and rejected.startswith(prompt)


def _margin(row: Row) -> float | None:
    """Only a column of that name: scores of unknown scale are not log-odds."""
    if row.get("margin") in (None, ""):
        return None
    margin = number_of(row, "margin")
    if abs(margin) > MOST_MARGIN:
        raise RowError("margin is too large", f"{margin:g}")
    return margin


def _answers_in_turns(row: Row, columns: Columns, prompt: Prompt) -> tuple[Prompt, str, str]:
    """Splits two lists of turns into the prompt, the chosen and the rejected answer.

    Each list may be the answer alone, or a conversation that repeats the prompt.
    """
    sides = [turns_of(row.get(columns[side]), columns[side]) for side in ("chosen", "rejected")]
    given = prompt.messages
    if all(side[: len(given)] == given for side in sides):
        sides = [side[len(given) :] for side in sides]
    elif all(len(side) > 1 for side in sides):
        given = ()  # the conversations carry their own prompt
    messages, chosen, rejected = common_prompt(*sides)
    turns = (*given, *messages)
    if not turns:
        raise RowError("answers without a prompt")
    return Prompt(turns), chosen, rejected


def common_prompt(
    chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> tuple[tuple[Message, ...], str, str]:
    """Returns the turns that two conversations share, and the one answer that ends each."""
    if not chosen or not rejected:
        raise RowError("an answer is empty")
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    ends = (chosen[shared:], rejected[shared:])
    if any(len(end) != 1 or end[0].role != "assistant" for end in ends):
        raise RowError("conversations part before the last answer")
    return chosen[:shared], ends[0][0].content, ends[1][0].content


def transcripts(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    r"""HH-RLHF's {chosen, rejected}: whole conversations that differ in the last answer."""
    names = [columns[side] for side in ("chosen", "rejected")]
    if all(isinstance(row.get(name), list) for name in names):
        sides = [turns_of(row.get(name), name) for name in names]
        messages, chosen, rejected = common_prompt(*sides)
        if not any(message.role == "user" for message in messages):
            raise RowError("conversations share no user turn")
        return Normalised(
            (Record(messages, chosen=chosen, rejected=rejected, margin=_margin(row)),)
        )
    parts = split_transcripts(*(text_of(row, name) for name in names))
    if parts is None:
        raise RowError(f"transcripts share no {ASSISTANT_MARK!r}")
    text, chosen, rejected = parts
    if not chosen.strip() or not rejected.strip():
        raise RowError("a transcript ends in an empty answer")
    if any(mark in side for mark in (ASSISTANT_MARK, "\n\nHuman:") for side in (chosen, rejected)):
        raise RowError("transcripts part before the last answer")
    if verbatim:
        messages = (Message("user", text),)
    else:
        messages = parse_turns(text) or ()
        if not messages or messages[-1].role != "user":
            raise RowError("transcript has no user turn before the answer")
        chosen, rejected = chosen.strip(), rejected.strip()
    return Normalised((Record(messages, chosen=chosen, rejected=rejected, margin=_margin(row)),))


def sampled(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """Rows of `rlhf data make-pairs`: final texts with their token ids, kept as they are."""
    if row.get("rendered") is not True:
        raise RowError("rendered is not true")
    messages = (Message("user", text_of(row, "prompt")),)
    present = [side for side in ("chosen", "rejected") if row.get(side) is not None]
    if len(present) == 1:
        raise RowError(f"{present[0]} without its counterpart")
    if row.get("response") is not None:
        present.append("response")
    answers: dict[str, Any] = {side: text_of(row, side) for side in present}
    ids = None
    if row.get("tokenizer") and row.get("prompt_ids"):
        ids = TokenIds(
            encodable(str(row["tokenizer"]), "tokenizer"),
            prompt=_ids(row, "prompt_ids"),
            response=_ids(row, "response_ids"),
            chosen=_ids(row, "chosen_ids"),
            rejected=_ids(row, "rejected_ids"),
        )
        bare = [side for side in present if not getattr(ids, side)]
        if bare:
            raise RowError(f"prompt_ids without {bare[0]}_ids")
    return Normalised((Record(messages, margin=_margin(row), rendered=True, ids=ids, **answers),))


def _ids(row: Row, column: str) -> tuple[int, ...]:
    values = row.get(column) or ()
    if not isinstance(values, (list, tuple)):
        raise RowError(f"{column} are not a list", type(values).__name__)
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise RowError(f"{column} are not integers")
    if values and not 0 <= min(values) <= max(values) <= _HIGHEST_ID:
        raise RowError(f"{column} are no token ids", f"{min(values)} to {max(values)}")
    return tuple(values)
