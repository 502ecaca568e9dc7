"""Preference pairs out of a model's own answers, ranked by a scorer.

For every prompt the model samples some answers; the scorer ranks them; answers far enough apart
become a pair. Rows keep the sampled ids beside the text: a model with the same tokenizer trains
on exactly the tokens that were sampled (text encoded again may split differently).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data_sources.answer_ranking import ScoredAnswer, best_answer, ranked_pairs
from data_sources.openings import Opening, SampleIds

if TYPE_CHECKING:
    from rlhf_app.models.chat_format import ChatFormat
    from rlhf_app.scorers import Scorer

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PairSettings:
    """What is made of the answers.

    Attributes:
        min_gap: a pair's scores differ by more than this.
        pairs_per_prompt: most pairs of one prompt, widest gaps first; None is all.
        best_of: write the best answer as a `response` in place of pairs.
    """

    min_gap: float
    pairs_per_prompt: int | None
    best_of: bool


@dataclass(slots=True)
class PairCounts:
    """What became of a set of prompts.

    Attributes:
        prompts: how many.
        answers: sampled answers.
        tokens: sampled tokens, stop tokens included.
        ended: answers that end with a stop token; the others were cut.
        rows: pairs, or best answers, that were kept.
        small_gap: prompts of which no two answers lie far enough apart.
        changed: answers whose text does not encode to the sampled ids; left out.
        empty: answers without text; left out.
        score_sum: of all scored answers, those left out included.
        best_sum: of the best usable answer of each prompt.
        best: prompts with a usable answer.
    """

    prompts: int = 0
    answers: int = 0
    tokens: int = 0
    ended: int = 0
    rows: int = 0
    small_gap: int = 0
    changed: int = 0
    empty: int = 0
    score_sum: float = 0.0
    best_sum: float = 0.0
    best: int = 0

    @property
    def ended_share(self) -> float:
        """Share of answers that end by themselves."""
        return self.ended / max(self.answers, 1)

    @property
    def mean_score(self) -> float:
        """Mean score of all answers: what the model scores as it is."""
        return self.score_sum / max(self.answers, 1)

    @property
    def mean_best(self) -> float:
        """Mean over prompts of the best usable score: best-of-n."""
        return self.best_sum / max(self.best, 1)

    @property
    def round_trip(self) -> float:
        """Share of answers whose text, encoded after the prompt's, gives the sampled ids."""
        return 1 - self.changed / max(self.answers - self.empty, 1)


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt with its usable answers."""

    opening: Opening
    answers: tuple[ScoredAnswer, ...]


@dataclass(frozen=True, slots=True)
class AnswerSource:
    """Samples and scores answers.

    Attributes:
        sample: continues prompts.
        fmt: chat format of the model: decodes, and encodes for the round trip.
        scorer: the user's.
        num_answers: answers to each prompt.
        batch_size: answers sampled at once, rounded down to whole prompts (at least one).
        advance: called with the number of prompts done after each batch.
    """

    sample: SampleIds
    fmt: ChatFormat
    scorer: Scorer
    num_answers: int
    batch_size: int
    advance: Callable[[int], None]

    def answer(
        self, openings: Sequence[Opening], first: int, counts: PairCounts
    ) -> Iterator[Answered]:
        """Yields each prompt with its usable answers, in order.

        Args:
            openings: the prompts.
            first: number of the first prompt in the job. Answer j of prompt i has the random
                stream i * num_answers + j, whatever the batch size.
            counts: filled on the way.
        """
        step = max(self.batch_size // self.num_answers, 1)
        for start in range(0, len(openings), step):
            batch = openings[start : start + step]
            repeated = [opening for opening in batch for _ in range(self.num_answers)]
            uid = (first + start) * self.num_answers
            sampled = self.sample(
                [opening.ids for opening in repeated], range(uid, uid + len(repeated))
            )
            texts = [
                answer_text(self.fmt, opening, ids)
                for opening, ids in zip(repeated, sampled, strict=True)
            ]
            scores = self.scorer([opening.text for opening in repeated], texts)
            answers = [
                ScoredAnswer(tuple(ids), text, score)
                for ids, text, score in zip(sampled, texts, scores, strict=True)
            ]
            for index, opening in enumerate(batch):
                mine = answers[index * self.num_answers : (index + 1) * self.num_answers]
                yield Answered(opening, self._usable(opening, mine, counts))
            self.advance(len(batch))

    def _usable(
        self, opening: Opening, answers: Sequence[ScoredAnswer], counts: PairCounts
    ) -> tuple[ScoredAnswer, ...]:
        counts.prompts += 1
        counts.answers += len(answers)
        counts.tokens += sum(len(answer.ids) for answer in answers)
        counts.ended += sum(bool({*a.ids[-1:]} & {*self.fmt.stop_ids}) for a in answers)
        counts.score_sum += sum(answer.score for answer in answers)
        kept = []
        for answer in answers:
            if not answer.text.strip():
                counts.empty += 1
            elif not round_trips(self.fmt, opening, answer):
                counts.changed += 1
            else:
                kept.append(answer)
        best = best_answer(kept)
        if best is not None:
            counts.best += 1
            counts.best_sum += best.score
        return tuple(kept)


def answer_text(fmt: ChatFormat, opening: Opening, ids: Sequence[int]) -> str:
    """Returns what the answer adds to the prompt's text.

    Decoded alone it would lose its leading space under SentencePiece tokenizers.
    """
    before = fmt.decode(opening.ids)
    after = fmt.decode([*opening.ids, *ids])
    return after.removeprefix(before) if after.startswith(before) else fmt.decode(ids)


def round_trips(fmt: ChatFormat, opening: Opening, answer: ScoredAnswer) -> bool:
    """Whether prompt and answer, encoded as one string, give the sampled ids again.

    The end token is left out of the comparison: an answer cut by length has none, and encoding
    adds one.
    """
    encoded = fmt.encode([("user", opening.text)], answer.text, rendered=True)
    ids = answer.ids[:-1] if answer.ids[-1] in fmt.stop_ids else answer.ids
    return encoded.response_start == len(opening.ids) and tuple(encoded.ids[:-1]) == (
        *opening.ids,
        *ids,
    )


def training_rows(
    answered: Iterable[Answered], settings: PairSettings, tokenizer: str, counts: PairCounts
) -> Iterator[Row]:
    """Yields pairs (or best answers) of the prompts that have any.

    Args:
        answered: prompts with their answers.
        settings: what is wanted.
        tokenizer: `tokenizer_hash` of the ids.
        counts: kept and skipped prompts are added here.
    """
    for item in answered:
        if settings.best_of:
            best = best_answer(item.answers)
            rows = [] if best is None else [_prompt(item.opening, tokenizer) | _response(best)]
        else:
            rows = _pair_rows(item, settings, tokenizer)
            counts.small_gap += not rows
        counts.rows += len(rows)
        yield from rows


def evaluation_rows(
    answered: Iterable[Answered], settings: PairSettings, tokenizer: str, counts: PairCounts
) -> Iterator[Row]:
    """Yields at least one row of every prompt: its pairs, or the prompt alone.

    With `best_of` the best answer stands in the prompt's first row as its `response`.
    Arguments as `training_rows`.
    """
    for item in answered:
        rows = _pair_rows(item, settings, tokenizer)
        counts.rows += len(rows)
        counts.small_gap += not rows
        rows = rows or [_prompt(item.opening, tokenizer)]
        best = best_answer(item.answers) if settings.best_of else None
        if best is not None:
            rows[0] |= _response(best)
        yield from rows


def _pair_rows(item: Answered, settings: PairSettings, tokenizer: str) -> list[Row]:
    pairs = ranked_pairs(item.answers, settings.min_gap, settings.pairs_per_prompt)
    return [
        _prompt(item.opening, tokenizer)
        | {
            "chosen": chosen.text,
            "rejected": rejected.text,
            "chosen_ids": list(chosen.ids),
            "rejected_ids": list(rejected.ids),
            "chosen_score": chosen.score,
            "rejected_score": rejected.score,
        }
        for chosen, rejected in pairs
    ]


def _prompt(opening: Opening, tokenizer: str) -> Row:
    return {
        "prompt": opening.text,
        "rendered": True,
        "tokenizer": tokenizer,
        "prompt_ids": list(opening.ids),
    }


def _response(answer: ScoredAnswer) -> Row:
    return {
        "response": answer.text,
        "response_ids": list(answer.ids),
        "response_score": answer.score,
    }
