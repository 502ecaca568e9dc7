"""The gold score of the embedded task: what the generated preferences are made from.

The reward model sees pairs only, never this function; the run tracks gold beside the learnt
reward, so that a reward model that is fooled shows.
"""

from __future__ import annotations

import itertools
import re

from data_sources.embedded.words import HARSH_WORDS, KIND_WORDS, THING_WORDS

TOPIC_WEIGHT = 0.4
TONE_WEIGHT = 0.4
FORM_WEIGHT = 0.2
KIND_WORDS_WANTED = 3

_WORD = re.compile(r"[a-z]+")


def gold(prompts: list[str], answers: list[str]) -> list[float]:
    """Scores answers between 0 and 1: .4 topic + .4 tone + .2 form.

    - topic: of all things named in the answer or asked for in the prompt, the share that is
      both (Jaccard), so that neither a fixed answer nor a list of everything scores full;
    - tone: (different kind words, at most 3, minus harsh words) / 3, never below 0;
    - form: half for ending in a full stop, half for the share of word pairs that are new
      (1 when no two neighbouring words come twice). An empty answer has none of it.

    Args:
        prompts: prompt texts.
        answers: one answer text for each.

    Returns:
        One score for each answer.

    Raises:
        ValueError: the two lists differ in length.
    """
    return [
        TOPIC_WEIGHT * _topic(prompt, answer)
        + TONE_WEIGHT * _tone(answer)
        + FORM_WEIGHT * _form(answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _topic(prompt: str, answer: str) -> float:
    asked = THING_WORDS.intersection(_words(prompt))
    named = THING_WORDS.intersection(_words(answer))
    return len(asked & named) / len(asked | named) if asked | named else 0.0


def _tone(answer: str) -> float:
    words = _words(answer)
    kind = min(len(KIND_WORDS.intersection(words)), KIND_WORDS_WANTED)
    harsh = sum(word in HARSH_WORDS for word in words)
    return max(0, kind - harsh) / KIND_WORDS_WANTED


def _form(answer: str) -> float:
    words = _words(answer)
    if not words:
        return 0.0
    pairs = list(itertools.pairwise(words))
    new = len(set(pairs)) / len(pairs) if pairs else 1.0
    return 0.5 * answer.rstrip().endswith(".") + 0.5 * new
