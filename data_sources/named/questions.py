"""Questions and answers in Chinese, Japanese and other languages."""

from __future__ import annotations

from functools import partial

from data_sources.fields import Row, RowError
from data_sources.named.dataset import NamedDataset
from data_sources.normalise import (
    Columns,
    Normalised,
    prompt_of,
    prompt_only,
    prompt_response,
)
from data_sources.ranked import first_passage, passages
from data_sources.records import Record

NO_NEGATIVE = "no negative passage: no pair"
NO_SHORT_ANSWER = "question without a short answer: prompt only"

# https://arxiv.org/abs/2007.15207, table 2
_MKQA_LANGUAGES = (
    "ar da de en es fi fr he hu it ja ko km ms nl no pl pt ru sv th tr vi zh_cn zh_hk zh_tw"
)


def _miracl(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """MIRACL: the first positive and the first negative passage; some rows have no negative."""
    if row.get("negative_passages"):
        return passages(row, columns, verbatim)
    prompt = prompt_of(row, columns, verbatim)
    answer = prompt.answer(first_passage(row, "positive_passages"), verbatim)
    return Normalised((Record(prompt.messages, response=answer),), (NO_NEGATIVE,))


def _mkqa(row: Row, columns: Columns, verbatim: bool, *, language: str) -> Normalised:
    """MKQA: the question and the first answer in one language; a third of them have none."""
    queries, answers = row.get("queries"), row.get("answers")
    if not isinstance(queries, dict) or not isinstance(answers, dict):
        raise RowError("queries or answers are missing")
    found = answers.get(language) or [{}]
    text = found[0].get("text")
    flat = {"prompt": queries.get(language), "response": text}
    if text is None or not str(text).strip():
        return Normalised(prompt_only(flat, columns, verbatim).records, (NO_SHORT_ANSWER,))
    return prompt_response(flat, columns, verbatim)


def _jaquad_paragraphs(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """lmqg/qag_jaquad: the first question about a paragraph, and the paragraph."""
    questions = row.get("questions")
    if not isinstance(questions, list) or not questions:
        raise RowError("questions is empty")
    return prompt_response({**row, "question": questions[0]}, columns, verbatim)


def _miracl_of(language: str) -> NamedDataset:
    return NamedDataset(
        f"Cohere/miracl-{language}-queries-22-12",
        _miracl,
        {"prompt": "query"},
        "question + passages",
        evaluation=("dev", "validation"),
    )


def _mkqa_of(language: str) -> NamedDataset:
    return NamedDataset(
        "apple/mkqa",
        partial(_mkqa, language=language),
        {"prompt": "prompt", "response": "response"},
        f"question + answer ({language})",
        config="mkqa",
    )


QUESTIONS: dict[str, NamedDataset] = {
    "Cohere/miracl-zh-queries-22-12": _miracl_of("zh"),
    "Cohere/miracl-ja-queries-22-12": _miracl_of("ja"),
    "Hello-SimpleAI/HC3-Chinese": NamedDataset("Hello-SimpleAI/HC3-Chinese", config="all"),
    # DeepSpeed-Chat's names for two languages of one dataset.
    "mkqa-Chinese": _mkqa_of("zh_cn"),
    "mkqa-Japanese": _mkqa_of("ja"),
    "apple/mkqa": _mkqa_of("en"),
    **{f"apple/mkqa:{language}": _mkqa_of(language) for language in _MKQA_LANGUAGES.split()},
    "lmqg/qg_jaquad": NamedDataset(
        "lmqg/qg_jaquad",
        prompt_response,
        {"prompt": "question", "response": "sentence"},
        "question + sentence",
        evaluation=("validation",),
    ),
    "lmqg/qag_jaquad": NamedDataset(
        "lmqg/qag_jaquad",
        _jaquad_paragraphs,
        {"prompt": "question", "response": "paragraph"},
        "question + paragraph",
        evaluation=("validation",),
    ),
}
