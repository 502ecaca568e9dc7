"""Settings of the data: sources, their blend and split, and how text becomes tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rlhf_app.config.column_names import unknown_names
from rlhf_app.config.functions import function_file, names_function
from rlhf_app.config.section import Location, Section

ChatFormat = Literal["auto", "template", "human_assistant", "plain"]
Truncation = Literal["drop", "left", "right", "keep_last_turns"]


class TruncationConfig(Section):
    """What is kept of rows beyond their length limit; what was cut is counted.

    left cuts the beginning of the prompt, right the end of the row, keep_last_turns leaves out
    the oldest turns but the system's, drop leaves out the row.
    """

    sft: Truncation = Field("right", description="Demonstrations, against data.max_length.")
    reward: Truncation = Field(
        "drop",
        description="Pairs, against data.max_length. right scores unfinished answers.",
    )
    ppo: Truncation = Field(
        "drop",
        description="Prompts, against ppo.max_prompt_length. right suits plain text alone.",
    )


class SourceConfig(Section):
    """One data source and its share in the blend."""

    path: Location = Field(
        description="File, pattern (data/*.jsonl), directory, address (s3://..., https://...) or "
        "Hub dataset id (id:config for a config)."
    )
    weight: float = Field(
        1.0,
        ge=1e-6,
        le=1e6,
        description="Relative weight in the blend; 1 takes every row once.",
    )
    split: str | None = Field(
        None, description="Split of a Hub dataset; unset: train (validation/test for evaluation)."
    )
    columns: dict[str, str] = Field(
        {},
        description="Columns of other names, as ours: theirs; ours are prompt, response, chosen, "
        "rejected, messages, system, input, margin and those of docs/data.md. Nested columns by "
        "dots: question.text.",
    )
    max_rows: int | None = Field(
        None, ge=1, description="At most this many records, drawn by their content."
    )
    stages: tuple[Literal["sft", "reward", "ppo"], ...] = Field(
        (), description="Of data.sources: the only stages that it is split over; unset: all."
    )
    prompts_only: bool = Field(
        False, description="Of data.sources: its answers are left out; it goes to PPO alone."
    )
    normaliser: str | None = Field(
        None,
        description="module:function or file.py:function from a row (dict) to a record (dict with "
        "our names of columns), a list of them, or None; or the Hub id of a known dataset that the "
        "source is a copy of.",
    )

    @model_validator(mode="after")
    def _columns_are_ours(self) -> SourceConfig:
        # A normaliser reads whatever names it likes.
        wrong = "" if self.normaliser else unknown_names(self.columns)
        if wrong:
            raise ValueError(f"{self.path}: {wrong}")
        return self

    @model_validator(mode="after")
    def _prompts_are_for_ppo(self) -> SourceConfig:
        if self.prompts_only and self.stages not in ((), ("ppo",)):
            raise ValueError(
                f"{self.path}: prompts_only rows have no answers, which only ppo can use; leave "
                "out stages or prompts_only"
            )
        return self

    @property
    def only_stages(self) -> tuple[Literal["sft", "reward", "ppo"], ...]:
        """The only stages that it may go to; empty: any."""
        return ("ppo",) if self.prompts_only else self.stages

    @property
    def normaliser_file(self) -> str:
        """The file whose content decides what the normaliser does, or an empty text."""
        spec = self.normaliser or ""
        return function_file(spec) if names_function(spec) else ""


def parse_source(text: str) -> dict[str, object]:
    """Split `path` or `path=weight`, the short form of a source.

    Only a number after the last `=` is a weight, so that a path may hold an equals sign; behind
    the ? of an address it is part of the address.
    """
    if "://" in text and "?" in text:
        return {"path": text}
    path, equals, weight = text.rpartition("=")
    if not equals:
        return {"path": text}
    try:
        return {"path": path, "weight": float(weight)}
    except ValueError:
        return {"path": text}


def _expand_sources(value: object) -> object:
    """Let a list of sources hold short forms, and a single source stand alone."""
    items = [value] if isinstance(value, str | dict) else value
    if not isinstance(items, list | tuple):
        return value
    return [parse_source(item) if isinstance(item, str) else item for item in items]


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_expand_sources)]


class BlendConfig(Section):
    """How often the rows of each source come in one pass over the data of a stage."""

    temperature: float = Field(
        1.0,
        ge=0.2,
        description="Shares of the sources are as weight * rows^(1/temperature): above 1 small "
        "sources have more than their size.",
    )
    exhaustion: Literal["weights", "first_exhausted", "all_exhausted", "once"] = Field(
        "weights",
        description="Length of a pass. weights: as many rows as the weights ask for. "
        "first_exhausted: no row twice, until a source runs out. all_exhausted: until every row "
        "was seen, rows of the others repeated. once: each row once, without regard to shares.",
    )


class DataConfig(Section):
    """What is trained and evaluated on, and how text becomes tokens."""

    sources: Sources = Field(
        (), description="Preference or instruction data, split across the stages."
    )
    sft: Sources = Field((), description="Replaces the split for SFT.")
    reward: Sources = Field((), description="Replaces the split for the RM.")
    ppo: Sources = Field((), description="Replaces the split for PPO prompts.")
    eval: Sources = Field(
        (), description="Held-out data for every stage; unset: a share of each stage's rows."
    )
    split: tuple[float, float, float] | Literal["shared"] = Field(
        (2.0, 4.0, 4.0),
        description="Shares of SFT, reward and PPO by prompt hash; shared gives every row to "
        "every stage.",
    )
    blend: BlendConfig = Field(
        default_factory=BlendConfig, description="Shares of the sources in training."
    )
    eval_fraction: float = Field(
        0.05, ge=0, lt=1, description="Share of prompts held out when data.eval is unset."
    )
    eval_limit: int = Field(512, ge=1, description="At most this many evaluation rows a stage.")
    chat_format: ChatFormat = Field(
        "auto",
        description="auto: the tokenizer's chat template if it has one, else "
        "'\\n\\nHuman: ...\\n\\nAssistant:'. plain: prompt and response as they stand.",
    )
    chat_template: Location | None = Field(
        None,
        description="File with a chat template (Jinja) in place of the tokenizer's; it is saved "
        "with every model that the run makes.",
    )
    truncation: TruncationConfig = Field(
        default_factory=TruncationConfig, description="Rows beyond their length limit."
    )
    max_length: int | None = Field(
        None,
        ge=2,
        description="Tokens of prompt + response in SFT and the RM; unset: the smaller of 512 "
        "and the model's positions.",
    )
    sft_loss_on: Literal["response", "all", "assistant_turns"] = Field(
        "response",
        description="Tokens that carry loss in SFT: those of the last answer, of every assistant "
        "turn, or all, prompts included.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        description="Processes that read large sources and turn their text into tokens; unset: the "
        "machine's cores over its ranks.",
    )
    cache_dir: Location | None = Field(
        None,
        description="Where records and tokens of large data are kept for the next start; unset: "
        "$RLHF_CACHE, else $XDG_CACHE_HOME/rlhf, else ~/.cache/rlhf.",
    )
    streaming: bool = Field(
        False,
        description="Read training rows while training goes on and keep none, for data larger than "
        "the disk: needs sft.max_steps, reward.max_steps, ppo.updates.",
    )
    shuffle_buffer: int = Field(
        10_000, ge=1, description="Streaming: rows of a source among which the next is drawn."
    )
    look_ahead: int = Field(
        10_000,
        ge=1,
        description="Streaming: first rows of each source, of which the held-out ones are for "
        "evaluation.",
    )
    max_bad_fraction: float = Field(
        0.1, ge=0, le=1, description="Stop when more than this share of a source is unusable."
    )

    @model_validator(mode="after")
    def _sources_agree(self) -> DataConfig:
        for name in ("sft", "reward", "ppo", "eval"):
            for source in getattr(self, name):
                if source.only_stages:
                    raise ValueError(
                        f"data.{name}: stages and prompts_only belong to data.sources, which are "
                        f"split; {source.path} is not"
                    )
        weighted = [
            s.path for s in (*self.sources, *self.sft, *self.reward, *self.ppo) if s.weight != 1
        ]
        if self.blend.exhaustion == "once" and (weighted or self.blend.temperature != 1):
            what = f"the weight of {weighted[0]}" if weighted else "data.blend.temperature"
            raise ValueError(
                f"data.blend.exhaustion = once takes each row once, so that {what} has no effect; "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _streams_know_no_sizes(self) -> DataConfig:
        if not self.streaming:
            return self
        if self.blend != BlendConfig():
            raise ValueError(
                "data.blend: temperature and exhaustion follow from the sizes of the sources, "
                "which data.streaming does not know; give the sources weights"
            )
        for source in (*self.sources, *self.sft, *self.reward, *self.ppo):
            if source.max_rows is not None:
                raise ValueError(
                    f"{source.path}: max_rows draws from all rows, which data.streaming does not "
                    "know; leave one of them out"
                )
            if source.only_stages:
                raise ValueError(
                    f"{source.path}: stages and prompts_only depend on the prompts of the other "
                    "sources, which data.streaming does not know; give the stage data of its own "
                    "(data.sft, data.reward, data.ppo)"
                )
        return self

    @model_validator(mode="after")
    def _formats_agree(self) -> DataConfig:
        if self.chat_template is not None and self.chat_format not in ("auto", "template"):
            raise ValueError(
                f"data.chat_template has no effect with data.chat_format = {self.chat_format}; "
                "leave one of them out"
            )
        if self.truncation.ppo == "right" and self.chat_format != "plain":
            raise ValueError(
                "data.truncation.ppo = right would cut off the question's end and the mark that "
                "asks for an answer; use left or keep_last_turns (or data.chat_format = plain)"
            )
        return self

    @field_validator("split", mode="before")
    @classmethod
    def _shares_from_text(cls, value: object) -> object:
        if isinstance(value, str) and value != "shared":
            value = value.split(",")
        if isinstance(value, list | tuple):
            try:
                shares = [float(share) for share in value]
            except (TypeError, ValueError, OverflowError):
                shares = []
            if len(shares) != 3:
                raise ValueError("expected three shares such as 2,4,4, or shared")
            return shares
        return value

    @field_validator("split")
    @classmethod
    def _shares(cls, value: object) -> object:
        if isinstance(value, tuple) and (min(value) < 0 or sum(value) <= 0):
            raise ValueError("shares must be >= 0 and not all 0, for example 2,4,4")
        return value
