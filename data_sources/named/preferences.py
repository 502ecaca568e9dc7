"""Datasets of pairs, and of two answers of which people said which is better."""

from __future__ import annotations

from data_sources.fields import Row, RowError, answer_of, number_of, text_of
from data_sources.named.dataset import NamedDataset
from data_sources.normalise import Columns, Normalised, preference, prompt_of
from data_sources.ranked import TIED, scored_pair
from data_sources.records import Record
from data_sources.transcripts import parse_turns

TIED_NOTE = f"{TIED}: the first is an answer to imitate"
_PAIR = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}


def _reward_datasets(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """yitingxie/rlhf-reward-datasets: the mark `Assistant:` stands before the answers."""
    after = {side: text_of(row, side).split("Assistant:")[-1] for side in ("chosen", "rejected")}
    framed = text_of(row, "prompt") + "Assistant:"
    return preference({**row, **after, "prompt": framed}, columns, verbatim)


def _webgpt(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """WebGPT: the higher score wins. A quarter of the rows are tied: no pair, but an answer."""
    if number_of(row, "score_0") != number_of(row, "score_1"):
        return scored_pair(row, columns, verbatim)
    (record,) = scored_pair({**row, "score_0": 1, "score_1": 0}, columns, verbatim).records
    return Normalised((Record(record.messages, response=record.chosen),), (TIED_NOTE,))


def _red_team(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """HH-RLHF's red-team-attempts: dialogues up to the last attempt; no answer is a model."""
    turns = list(parse_turns(text_of(row, "transcript")) or ())
    while turns and turns[-1].role != "user":
        turns.pop()
    if not turns:
        raise RowError("transcript has no user turn")
    return Normalised((Record(tuple(turns)),))


def _summaries(row: Row, columns: Columns, verbatim: bool) -> Normalised:
    """OpenAI's comparisons of two summaries of a Reddit post or a news article.

    The prompt is the one of trl-lib/tldr, so that both datasets share their prompts' splits.
    """
    info, summaries = row.get("info"), row.get("summaries")
    if not isinstance(info, dict) or not isinstance(summaries, list) or len(summaries) != 2:
        raise RowError("info or the two summaries are missing")
    choice = int(number_of(row, "choice"))
    if choice not in (0, 1):
        raise RowError("choice is neither 0 nor 1", str(choice))
    texts = [answer_of(summary, "text") for summary in summaries]
    if info.get("article"):
        question = f"TITLE: {info.get('title') or ''}\n\nARTICLE: {text_of(info, 'article')}"
    else:
        subreddit = str(info.get("subreddit") or "")
        question = (
            f"SUBREDDIT: r/{subreddit.removeprefix('r/')}\n\nTITLE: {info.get('title') or ''}"
            f"\n\nPOST: {text_of(info, 'post')}"
        )
    prompt = prompt_of({"prompt": f"{question}\n\nTL;DR:"}, columns, verbatim)
    chosen, rejected = (prompt.answer(texts[i], verbatim) for i in (choice, 1 - choice))
    return Normalised((Record(prompt.messages, chosen=chosen, rejected=rejected),))


def _has_test(hub_id: str) -> NamedDataset:
    return NamedDataset(hub_id, evaluation=("test",))


PREFERENCES: dict[str, NamedDataset] = {
    "Dahoas/rm-static": _has_test("Dahoas/rm-static"),
    "Dahoas/full-hh-rlhf": _has_test("Dahoas/full-hh-rlhf"),
    "Dahoas/synthetic-instruct-gptj-pairwise": NamedDataset(
        "Dahoas/synthetic-instruct-gptj-pairwise"
    ),
    "yitingxie/rlhf-reward-datasets": NamedDataset(
        "yitingxie/rlhf-reward-datasets",
        _reward_datasets,
        _PAIR,
        "prompt + chosen + rejected",
        evaluation=("test",),
    ),
    "openai/webgpt_comparisons": NamedDataset(
        "openai/webgpt_comparisons", _webgpt, {"prompt": "question"}, "two scored answers"
    ),
    "stanfordnlp/SHP": NamedDataset(
        "stanfordnlp/SHP", evaluation=("validation",), config_is_folder=True
    ),
    "Anthropic/hh-rlhf": NamedDataset(
        "Anthropic/hh-rlhf", evaluation=("test",), config_is_folder=True
    ),
    "Anthropic/hh-rlhf:red-team-attempts": NamedDataset(
        "Anthropic/hh-rlhf", _red_team, shape="red team transcripts", config_is_folder=True
    ),
    "HuggingFaceH4/ultrafeedback_binarized": NamedDataset(
        "HuggingFaceH4/ultrafeedback_binarized", train="train_prefs", evaluation=("test_prefs",)
    ),
    "PKU-Alignment/PKU-SafeRLHF": _has_test("PKU-Alignment/PKU-SafeRLHF"),
    "openai/summarize_from_feedback": NamedDataset(
        "openai/summarize_from_feedback",
        _summaries,
        {"prompt": "prompt"},
        "two summaries",
        evaluation=("validation",),
        config="comparisons",
    ),
}
