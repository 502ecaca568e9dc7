"""Instructions and conversations with one answer, and Open-Assistant's trees."""

from __future__ import annotations

import re

from data_sources.fields import Row, RowError, optional_text, text_of, turns_of
from data_sources.named.dataset import NamedDataset
from data_sources.normalise import Columns, Normalised, conversation, prompt_response
from data_sources.records import Message
from data_sources.transcripts import merge_turns

# Vicuna's turns; answers end in </s>.
_VICUNA = re.compile(r"(?:^|</s>|\s)\s*(USER|ASSISTANT):")


def _sharegpt(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """ShareGPT, where some conversations begin with what is left of an answer."""
    turns = turns_of(row.get("conversations"), "conversations")
    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
    kept = [turn for i, turn in enumerate(turns) if i >= first or turn.role == "system"]
    written = [{"role": turn.role, "content": turn.content} for turn in kept]
    return conversation({**row, "conversations": written}, columns, verbatim)


def _vicuna(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """pvduy/sharegpt_alpaca_oa_vicuna_format: `USER: ... ASSISTANT:` and the answer."""
    answer = text_of(row, "label").removesuffix("</s>")
    prompt: str | list[dict[str, str]] = text_of(row, "prompt")
    if not verbatim:
        pieces = _VICUNA.split(text_of(row, "prompt").strip())
        names = ["system", *pieces[1::2]]
        turns = merge_turns(
            Message("assistant" if name == "ASSISTANT" else "user", body)
            if name != "system"
            else Message("system", body)
            for name, body in zip(names, pieces[::2], strict=True)
        )
        if not any(turn.role == "user" for turn in turns):
            raise RowError("prompt has no USER: turn")
        prompt = [{"role": turn.role, "content": turn.content} for turn in turns]
    return prompt_response({"prompt": prompt, "label": answer}, columns, verbatim)


def _dolly(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """Dolly: the context that a question is about stands below it."""
    context = optional_text(row, "context").strip()
    parts = {**columns, "input": "context"} if context else columns
    return prompt_response(row, parts, verbatim)


def _sharegpt_at(hub_id: str, data_files: str | None = None) -> NamedDataset:
    return NamedDataset(
        hub_id,
        _sharegpt,
        {"messages": "conversations"},
        "conversations",
        data_files=data_files,
    )


INSTRUCTIONS: dict[str, NamedDataset] = {
    "OpenAssistant/oasst1": NamedDataset("OpenAssistant/oasst1", evaluation=("validation",)),
    "OpenAssistant/oasst2": NamedDataset("OpenAssistant/oasst2", evaluation=("validation",)),
    "databricks/databricks-dolly-15k": NamedDataset(
        "databricks/databricks-dolly-15k",
        _dolly,
        {"prompt": "instruction", "response": "response"},
        "instruction + context + response",
    ),
    "tatsu-lab/alpaca": NamedDataset("tatsu-lab/alpaca"),
    "trl-lib/tldr": NamedDataset("trl-lib/tldr", evaluation=("validation",)),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": _sharegpt_at(
        "anon8231489123/ShareGPT_Vicuna_unfiltered", "ShareGPT_V3_unfiltered_cleaned_split.json"
    ),
    "RyokoAI/ShareGPT52K": _sharegpt_at("RyokoAI/ShareGPT52K"),
    "shibing624/sharegpt_gpt4": _sharegpt_at("shibing624/sharegpt_gpt4"),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": NamedDataset(
        "pvduy/sharegpt_alpaca_oa_vicuna_format",
        _vicuna,
        {"prompt": "prompt", "response": "label"},
        "prompt + response",
        evaluation=("test",),
    ),
    "wangrui6/Zhihu-KOL": NamedDataset("wangrui6/Zhihu-KOL"),
}
