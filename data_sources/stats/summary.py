"""The numbers of `rlhf data stats`: what the tables, the page and `--json` show."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from data_sources.counts import SourceCounts, StageCounts
from data_sources.records import Record
from data_sources.stats.duplicates import Duplicates
from data_sources.stats.length_bias import LengthBias
from data_sources.stats.lengths import Lengths
from data_sources.stats.scripts import Scripts


@dataclass(slots=True)
class SourceStats:
    """One source.

    Attributes:
        counts: what became of its rows, with examples of bad ones.
        evaluation: it was read for evaluation.
        stops_a_run: more rows are unusable than data.max_bad_fraction lets pass.
        duplicates, prompts, answers: of its records; an answer is each text to learn from.
        identical_pairs: pairs with two equal answers.
    """

    counts: SourceCounts
    evaluation: bool = False
    stops_a_run: bool = False
    duplicates: Duplicates = field(default_factory=Duplicates)
    prompts: Scripts = field(default_factory=Scripts)
    answers: Scripts = field(default_factory=Scripts)
    identical_pairs: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "path": self.counts.path,
            "evaluation": self.evaluation,
            "shape": self.counts.shape,
            "rows": self.counts.read,
            "usable": self.counts.usable,
            "records": self.counts.records,
            "stops_a_run": self.stops_a_run,
            "bad_rows": [
                {"reason": reason, "rows": n, "examples": self.counts.samples.get(reason, [])}
                for reason, n in self.counts.bad.most_common()
            ],
            "left_out": dict(self.counts.set_aside.most_common()),
            "columns_not_used": self.counts.unused,
            "remarks": dict(self.counts.notes.most_common())
            | dict.fromkeys(self.counts.remarks, 1),
            "different_prompts": self.duplicates.prompts,
            "exact_duplicates": self.duplicates.exact,
            "same_prompt": self.duplicates.same_prompt,
            "identical_pairs": self.identical_pairs,
            "prompt_scripts": dict(self.prompts.texts.most_common()),
            "answer_scripts": dict(self.answers.texts.most_common()),
            "texts_with_emoji": self.prompts.with_emoji + self.answers.with_emoji,
        }


@dataclass(slots=True)
class StageStats:
    """One stage.

    Attributes:
        counts: records given, in use, and left out by reason; None where `problem` says why.
        problem: why the stage cannot start with this data.
        by_source: source -> [records to train on, records to evaluate on].
        lengths: prompt, answer, chosen or rejected -> lengths before anything is cut.
        rows: lengths of whole rows: prompt and the longest answer.
        limit: most tokens that the stage keeps of a row; None without a tokenizer.
        encoded: reason -> rows left out or cut when they become tokens.
        bias: of its pairs, by source.
        examples: a few records.
    """

    counts: StageCounts | None = None
    problem: str = ""
    by_source: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, Lengths] = field(default_factory=dict)
    rows: Lengths = field(default_factory=Lengths)
    limit: int | None = None
    encoded: Counter[str] = field(default_factory=Counter)
    bias: dict[str, LengthBias] = field(default_factory=dict)
    examples: list[Record] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        if self.counts is None:
            return {"problem": self.problem}
        return {
            "given": self.counts.candidates,
            "train": self.counts.train,
            "evaluation": self.counts.evaluation,
            "repeated": self.counts.repeated,
            "left_out": dict(self.counts.dropped.most_common()),
            "by_source": {
                name: {"train": train, "evaluation": evaluation}
                for name, (train, evaluation) in self.by_source.items()
            },
            "limit": self.limit,
            "over_limit": self.rows.above(self.limit) if self.limit is not None else None,
            "left_out_or_cut": dict(self.encoded.most_common()),
            "lengths": {
                **{part: lengths.as_json() for part, lengths in self.lengths.items()},
                "row": self.rows.as_json(),
            },
            "length_bias": {name: bias.as_json() for name, bias in self.bias.items()},
        }


@dataclass(slots=True)
class DataStats:
    """All sources and stages.

    Attributes:
        unit: what lengths count.
        model: whose tokenizer counts them; "" counts characters.
        refusals: why a run would refuse sources; those that cannot be read are not in `sources`.
    """

    unit: Literal["tokens", "characters"]
    model: str = ""
    sources: list[SourceStats] = field(default_factory=list)
    stages: dict[str, StageStats] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """Why a run with this data would stop: a source, or that no stage can start."""
        if self.refusals:
            more = len(self.refusals) - 1
            return self.refusals[0] + (f" (and {more} more of the sources)" if more else "")
        problems = [stage.problem for stage in self.stages.values() if stage.counts is None]
        return problems[0] if problems and len(problems) == len(self.stages) else ""

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "unit": self.unit,
            "model": self.model,
            "sources": [source.as_json() for source in self.sources],
            "refused": self.refusals,
            "stages": {name: stage.as_json() for name, stage in self.stages.items()},
        }
