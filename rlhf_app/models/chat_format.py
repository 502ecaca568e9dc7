r"""Conversations to text and token ids, and where an answer starts and ends.

One rule holds in SFT, reward model and PPO:

* Prompt and answer are encoded as ONE string; the answer starts at the first token that
  reaches past the prompt's last character, so a token that straddles the boundary belongs to
  the answer. The formats put a turn mark there, which keeps tokens apart: PPO's prompt, encoded
  alone, equals the prompt's part. Only plain text cut inside a word can differ near the cut.
* The answer ends with its first stop token, which is kept; what a template writes after it
  (ChatML's newline) is cut. Where the rendering has no stop token, one is appended as an id.
  Stop tokens are looked for in the answer only: OPT's BOS has the id of its EOS.
* The tokenizer's own prefix (BOS) comes first exactly once, whether the template writes it or
  not. Nothing that the tokenizer would add at the end is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_app.errors import ConfigError

Kind = Literal["auto", "template", "human_assistant", "plain"]
Turn = tuple[str, str]

_NAMES = {"user": "Human", "assistant": "Assistant", "tool": "Tool"}
_PROBE = "probe-answer"


class UnsupportedTurns(ValueError):
    """The chat template refuses these turns; the row is dropped and counted."""


@dataclass(frozen=True, slots=True)
class EncodedAnswer:
    """A prompt with its answer.

    Attributes:
        ids: prompt and answer, BOS included, ending with one stop token.
        response_start: index of the answer's first token.
    """

    ids: list[int]
    response_start: int


class ChatFormat:
    r"""How one tokenizer renders conversations.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        kind: "template" is the tokenizer's chat template; "human_assistant" writes
            `\n\nHuman: ...\n\nAssistant: ...` (a system turn goes first, unnamed); "plain"
            writes contents as they stand, turns joined by a blank line; "auto" is the template
            where the tokenizer has one, else human_assistant.
        extra_stop_ids: the generation config's EOS ids.

    Attributes:
        kind: the format in use, never "auto".
        stop_ids: ids that end an answer.
        end_id: the id appended to an answer that has none of them.

    Raises:
        ConfigError: no template although asked for, no EOS, or a tokenizer without offsets.
    """

    def __init__(
        self, tokenizer: Any, kind: Kind = "auto", extra_stop_ids: Sequence[int] = ()
    ) -> None:
        has_template = bool(tokenizer.chat_template)
        if kind == "template" and not has_template:
            raise ConfigError(
                "data.chat_format is template but the tokenizer has no chat template; "
                "use human_assistant or plain"
            )
        if not tokenizer.is_fast:
            raise ConfigError(
                f"tokenizer {type(tokenizer).__name__} gives no character offsets; "
                "use a model that ships a tokenizer.json"
            )
        self.tokenizer = tokenizer
        if kind == "auto":
            kind = "template" if has_template else "human_assistant"
        self.kind: Kind = kind
        self._prefix = _added_prefix(tokenizer)
        # What the format writes between the prompt and an answer, and after an answer.
        self._lead, self._tail, turn_end = "", "", None
        self._system_allowed = True
        if kind == "human_assistant":
            self._lead = " "
        elif kind == "template":
            self._system_allowed = self._accepts_system()
            self._lead, self._tail, turn_end = self._probe_template()
        eos = tokenizer.eos_token_id
        stops = [*extra_stop_ids, turn_end, eos]
        self.stop_ids: tuple[int, ...] = tuple(
            dict.fromkeys(int(i) for i in stops if i is not None)
        )
        if not self.stop_ids:
            raise ConfigError(
                "the tokenizer has no EOS token; set one in its tokenizer_config.json"
            )
        end = turn_end if turn_end is not None else eos
        self.end_id: int = int(end) if end is not None else self.stop_ids[0]

    def prompt_text(self, messages: Sequence[Turn], rendered: bool = False) -> str:
        """Returns the text that a model continues.

        Args:
            messages: (role, content) turns.
            rendered: there is exactly one turn, and it is that text already.

        Raises:
            UnsupportedTurns: the chat template refuses these roles in this order.
        """
        if rendered:
            assert len(messages) == 1, "a rendered prompt has one turn"
            return messages[0][1]
        if self.kind == "plain":
            return "\n\n".join(content for _, content in messages)
        if self.kind == "human_assistant":
            return _human_assistant(messages)
        return self._apply(self._fit_system(messages), add_generation_prompt=True)

    def prompt_ids(self, messages: Sequence[Turn], rendered: bool = False) -> list[int]:
        """Returns `prompt_text` as ids, with the tokenizer's BOS once where it adds one."""
        text = self.prompt_text(messages, rendered)
        return self._with_prefix(
            self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        )

    def encode(
        self, messages: Sequence[Turn], response: str, rendered: bool = False
    ) -> EncodedAnswer:
        """Returns prompt and answer as ids (see the module's rules).

        Args:
            messages: (role, content) turns of the prompt.
            response: the answer's text; an empty one becomes the stop token alone.
            rendered: the prompt is one turn of final text, and the answer follows it directly.

        Raises:
            UnsupportedTurns: the chat template refuses these roles in this order.
        """
        prompt = self.prompt_text(messages, rendered)
        lead, tail = ("", "") if rendered else (self._lead, self._tail)
        if not response or response[0].isspace():
            lead = ""
        encoding = self.tokenizer(
            prompt + lead + response + tail,
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids: list[int] = encoding["input_ids"]
        ends = [end for _, end in encoding["offset_mapping"]]
        start = next((i for i, end in enumerate(ends) if end > len(prompt)), len(ids))
        answer = self._ended(ids[start:])
        context = self._with_prefix(ids[:start])
        return EncodedAnswer(context + answer, len(context))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` without special tokens."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _ended(self, answer: list[int]) -> list[int]:
        """Cuts after the first stop token, or appends one."""
        for i, token in enumerate(answer):
            if token in self.stop_ids:
                return answer[: i + 1]
        return [*answer, self.end_id]

    def _with_prefix(self, ids: list[int]) -> list[int]:
        if ids[: len(self._prefix)] == self._prefix:
            return list(ids)
        return [*self._prefix, *ids]

    def _apply(self, messages: Sequence[Turn], add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise UnsupportedTurns(f"the chat template refuses these turns: {error}") from error
        return text

    def _accepts_system(self) -> bool:
        """Some templates raise on a system turn, and some drop it without a word."""
        try:
            text = self._apply([("system", _PROBE), ("user", "x")], add_generation_prompt=True)
        except UnsupportedTurns:
            return False
        return _PROBE in text

    def _fit_system(self, messages: Sequence[Turn]) -> Sequence[Turn]:
        """Moves a system turn into the first user turn where the template has no place for it."""
        if self._system_allowed or len(messages) < 2 or messages[0][0] != "system":
            return messages
        (_, system), (role, content), *rest = messages
        return [(role, f"{system}\n\n{content}"), *rest]

    def _probe_template(self) -> tuple[str, str, int | None]:
        """Returns the text before and after an answer, and the end-of-turn id if there is one."""
        question = [("user", "x")]
        full = self._apply([*question, ("assistant", _PROBE)], add_generation_prompt=False)
        prompt = self._apply(question, add_generation_prompt=True)
        before, found, after = full.rpartition(_PROBE)
        if not found:
            raise ConfigError(
                "the tokenizer's chat template does not write assistant turns; "
                "use --chat-format human_assistant"
            )
        lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
        encoding = self.tokenizer(after, add_special_tokens=False, return_offsets_mapping=True)
        special = set(self.tokenizer.added_tokens_decoder) | set(self.tokenizer.all_special_ids)
        for token, (_, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
            if token in special:
                return lead, after[:end], int(token)
        return lead, "", None


def _added_prefix(tokenizer: Any) -> list[int]:
    """Returns the ids that the tokenizer puts before any text, in practice [BOS] or []."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer("a")["input_ids"]
    at = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return full[:at]


def _human_assistant(messages: Sequence[Turn]) -> str:
    text = "".join(
        content if role == "system" else f"\n\n{_NAMES[role]}: {content}"
        for role, content in messages
    )
    return text + "\n\nAssistant:"
