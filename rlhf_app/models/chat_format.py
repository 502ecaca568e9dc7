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
* Earlier assistant turns stay as the prompt has them, with the end token that the template
  writes there; human_assistant and plain write none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_templates import BROKEN_TEMPLATE
from rlhf_app.models.turn_spans import (
    Span,
    Turn,
    TurnsDoNotNest,
    UnsupportedTurns,
    has_marks,
    marked_spans,
    nested_spans,
    token_span,
)
from rlhf_app.models.written_formats import (
    HUMAN_LEAD,
    human_assistant,
    human_assistant_spans,
    plain,
    plain_spans,
)

__all__ = ["ChatFormat", "EncodedAnswer", "Kind", "TurnsDoNotNest", "UnsupportedTurns"]

Kind = Literal["auto", "template", "human_assistant", "plain"]

_PROBE = "probe-answer"


@dataclass(frozen=True, slots=True)
class EncodedAnswer:
    """A prompt with its answer.

    Attributes:
        ids: prompt and answer, BOS included, ending with one stop token.
        response_start: index of the answer's first token.
        earlier: tokens of the assistant turns before the answer, each with its end token where
            the format writes one; empty unless asked for.
    """

    ids: list[int]
    response_start: int
    earlier: tuple[Span, ...] = ()


class ChatFormat:
    r"""How one tokenizer renders conversations.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        kind: "template" is the tokenizer's chat template; "human_assistant" writes
            `\n\nHuman: ...\n\nAssistant: ...` (a system turn goes first, unnamed); "plain"
            writes contents as they stand, turns joined by a blank line; "auto" is the template
            where the tokenizer has one, else human_assistant.
        extra_stop_ids: the generation config's EOS ids.
        template_file: a chat template that replaces the tokenizer's, in the tokenizer too: it
            is saved with it.

    Attributes:
        kind: the format in use, never "auto".
        stop_ids: ids that end an answer.
        end_id: the id appended to an answer that has none of them.
        prefix_ids: what the tokenizer puts before any text, in practice [BOS] or [].

    Raises:
        ConfigError: no template although asked for, no EOS, or a tokenizer without offsets.
    """

    def __init__(
        self,
        tokenizer: Any,
        kind: Kind = "auto",
        extra_stop_ids: Sequence[int] = (),
        template_file: str | None = None,
    ) -> None:
        if template_file is not None:
            tokenizer.chat_template = Path(template_file).read_text(encoding="utf-8")
        self._template_name = template_file or f"of {tokenizer.name_or_path}"
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
        self.prefix_ids = _added_prefix(tokenizer)
        # What the format writes between the prompt and an answer, and after an answer.
        self._lead, self._tail, turn_end = "", "", None
        # All that a template writes after an answer that ends the conversation.
        self._after = ""
        self._system_allowed = self._tool_allowed = True
        if kind == "human_assistant":
            self._lead = HUMAN_LEAD
        elif kind == "template":
            self._system_allowed = self._accepts_system()
            self._tool_allowed = not self._drops_tool()
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
            return plain(messages)
        if self.kind == "human_assistant":
            return human_assistant(messages)
        if not self._tool_allowed and any(role == "tool" for role, _ in messages):
            raise UnsupportedTurns("the chat template leaves tool turns out")
        return self._apply(self._fit_system(messages), add_generation_prompt=True)

    def prompt_ids(self, messages: Sequence[Turn], rendered: bool = False) -> list[int]:
        """Returns `prompt_text` as ids, with the tokenizer's BOS once where it adds one."""
        text = self.prompt_text(messages, rendered)
        return self._with_prefix(
            self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        )

    def encode(
        self,
        messages: Sequence[Turn],
        response: str,
        rendered: bool = False,
        *,
        every_turn: bool = False,
    ) -> EncodedAnswer:
        """Returns prompt and answer as ids (see the module's rules).

        Args:
            messages: (role, content) turns of the prompt.
            response: the answer's text; an empty one becomes the stop token alone.
            rendered: the prompt is one turn of final text, and the answer follows it directly.
            every_turn: tell where the earlier assistant turns are, those of a rendered prompt
                excepted. A turn before the first user turn answers nothing and is left out.

        Raises:
            UnsupportedTurns: the chat template refuses these roles in this order.
            TurnsDoNotNest: of `every_turn`: earlier turns cannot be told apart.
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
        earlier: list[Span] = []
        if every_turn and not rendered:
            shift = len(context) - start
            for span in self._assistant_spans(messages, prompt):
                first, last = token_span(ids[:start], ends[:start], span, self.stop_ids)
                if first < last:
                    earlier.append((first + shift, last + shift))
        return EncodedAnswer(context + answer, len(context), tuple(earlier))

    def check_turns(self) -> None:
        """Checks that the assistant's earlier turns can be told apart in this format at all.

        Raises:
            ConfigError: prefixes do not nest in the chat template, and it has no marks.
        """
        talk = [("user", "x"), ("assistant", _PROBE), ("user", "y")]
        try:
            self.encode(talk, "z", every_turn=True)
        except TurnsDoNotNest as error:
            raise ConfigError(
                f"data.sft_loss_on = assistant_turns: the chat template {self._template_name} "
                f"rewrites earlier turns ({error}); put {{% generation %}} marks around what the "
                "assistant writes (data.chat_template: FILE), or set data.sft_loss_on to response"
            ) from error
        except UnsupportedTurns as error:
            raise ConfigError(
                f"data.sft_loss_on = assistant_turns: {error} (template {self._template_name}); "
                "set data.sft_loss_on to response"
            ) from error

    def _assistant_spans(self, messages: Sequence[Turn], prompt: str) -> list[Span]:
        """Returns the characters of the assistant's turns in the prompt, end tokens included."""
        if self.kind == "plain":
            return plain_spans(messages)
        if self.kind == "human_assistant":
            return human_assistant_spans(messages)
        turns = self._fit_system(messages)
        template = self.tokenizer.get_chat_template()
        if has_marks(template):
            spans = marked_spans(template, self.tokenizer.special_tokens_map, turns, prompt)
        else:
            spans = nested_spans(self._apply, turns, prompt)
        return [(start, self._end_of_turn(prompt, start, end)) for start, end in spans]

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Takes in an end token that marks left out; without one, leaves out what follows."""
        if self._tail:
            return end + len(self._tail) * text.startswith(self._tail, end)
        written = text[start:end]
        return end - len(self._after) * (bool(self._after) and written.endswith(self._after))

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
        if ids[: len(self.prefix_ids)] == self.prefix_ids:
            return list(ids)
        return [*self.prefix_ids, *ids]

    def _apply(self, messages: Sequence[Turn], add_generation_prompt: bool) -> str:
        from jinja2.exceptions import SecurityError, TemplateError

        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except SecurityError as error:
            raise ConfigError(
                f"the chat template {self._template_name} does what templates must not ({error}); "
                "set data.chat_template to a file with another"
            ) from error
        except (TemplateError, *BROKEN_TEMPLATE) as error:
            raise UnsupportedTurns(f"the chat template refuses these turns: {error}") from error
        return text

    def _accepts_system(self) -> bool:
        """Some templates raise on a system turn, and some drop it without a word."""
        try:
            text = self._apply([("system", _PROBE), ("user", "x")], add_generation_prompt=True)
        except UnsupportedTurns:
            return False
        return _PROBE in text

    def _drops_tool(self) -> bool:
        """Some templates write nothing for a tool's turn; those that raise do so for the row."""
        try:
            text = self._apply(
                [("user", "x"), ("assistant", "y"), ("tool", _PROBE)], add_generation_prompt=True
            )
        except UnsupportedTurns:
            return False
        return _PROBE not in text

    def _fit_system(self, messages: Sequence[Turn]) -> Sequence[Turn]:
        """Moves a system turn into the first user turn where the template has no place for it."""
        if self._system_allowed or len(messages) < 2 or messages[0][0] != "system":
            return messages
        (_, system), (role, content), *rest = messages
        return [(role, f"{system}\n\n{content}"), *rest]

    def _probe_template(self) -> tuple[str, str, int | None]:
        """Returns the text before and after an answer, and the end-of-turn id if there is one."""
        question = [("user", "x")]
        try:
            full = self._apply([*question, ("assistant", _PROBE)], add_generation_prompt=False)
            prompt = self._apply(question, add_generation_prompt=True)
        except UnsupportedTurns as error:
            raise ConfigError(
                f"the chat template {self._template_name} cannot write a question and its answer "
                f"({error.__cause__!r:.200}); name one that can with data.chat_template, or leave "
                "that out and set data.chat_format to human_assistant"
            ) from error
        before, found, after = full.rpartition(_PROBE)
        if not found:
            raise ConfigError(
                "the tokenizer's chat template does not write assistant turns; "
                "use --chat-format human_assistant"
            )
        lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
        self._after = after
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
