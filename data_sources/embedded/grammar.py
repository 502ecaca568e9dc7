"""Generates the prompts and answers of the embedded task from a seeded random stream.

Each answer has a hidden quality in [0, 1]: good ones keep to what was asked, use kind words and
end properly; bad ones wander, sneer, repeat themselves or break off. The language model learns
all of it from SFT, so that PPO has better answers to find.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import TypeVar

from data_sources.embedded import words

T = TypeVar("T")

# Prompts end in a line break: the answer is then plain text with no leading space.
QUESTIONS = (
    "Tell me about the {first} and the {second}.\n",
    "Write a note on the {first} and the {second}.\n",
    "What do you think of the {first} and the {second}?\n",
    "Please describe the {first} and the {second}.\n",
)
SENTENCES = (
    "The {thing} is {adjective} and {adjective}.",
    "My {person} {verbs} the {adjective} {thing} {time}.",
    "I {verb} the {adjective} {thing}.",
    "We {verb} the {thing} because it is {adjective}.",
    "Everyone says the {thing} looks {adjective} {time}.",
    "Our {adjective} {thing} was {adjective} {time}.",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the two things that it asks about."""

    text: str
    things: tuple[str, str]


def thing_pairs(rng: Random) -> list[tuple[str, str]]:
    """Returns every unordered pair of things once, in random order and orientation."""
    pairs = [pair if rng.random() < 0.5 else pair[::-1] for pair in combinations(words.THINGS, 2)]
    rng.shuffle(pairs)
    return pairs


def questions(rng: Random, pairs: list[tuple[str, str]]) -> Iterator[Question]:
    """Yields prompts forever: the pairs in random order, each asked in one of the four ways."""
    while True:
        for first, second in rng.sample(pairs, len(pairs)):
            template = rng.choice(QUESTIONS)
            yield Question(template.format(first=first, second=second), (first, second))


def answer(rng: Random, question: Question) -> str:
    """Returns one answer of random quality: one or two sentences, at most 23 words and stops."""
    quality = rng.random()
    asked = list(question.things)
    rng.shuffle(asked)
    sentences = [_sentence(rng, quality, thing) for thing in asked]
    fault = rng.random() - 0.5 * quality
    if fault > 0.4:
        return _faulty(rng, sentences)
    return " ".join(sentences)


def _faulty(rng: Random, sentences: list[str]) -> str:
    kind = rng.choice(("cut", "repeat", "short"))
    if kind == "repeat":
        return f"{sentences[0]} {sentences[0]}"
    if kind == "short":
        return sentences[0]
    kept = " ".join(sentences).removesuffix(".").split()
    return " ".join(kept[: -rng.randint(1, 4)])


def _sentence(rng: Random, quality: float, asked: str) -> str:
    """Fills one template; the asked thing is kept with a chance that grows with the quality."""
    template = rng.choice(SENTENCES)
    thing = asked if rng.random() < 0.3 + 0.6 * quality else rng.choice(words.THINGS)
    # One slot at a time: two adjectives of a sentence are drawn independently.
    while "{adjective}" in template:
        template = template.replace("{adjective}", _toned(rng, quality, _ADJECTIVES), 1)
    verb, verbs = _toned(rng, quality, _VERBS)
    return template.format(
        thing=thing,
        verb=verb,
        verbs=verbs,
        person=rng.choice(words.PEOPLE),
        time=rng.choice(words.TIMES),
    )


_ADJECTIVES = (words.KIND_ADJECTIVES, words.PLAIN_ADJECTIVES, words.HARSH_ADJECTIVES)
_VERBS = (words.KIND_VERBS, words.PLAIN_VERBS, words.HARSH_VERBS)


def _toned(rng: Random, quality: float, lists: tuple[tuple[T, ...], ...]) -> T:
    """Draws from the kind list with chance .1 + .7 quality, else from plain or harsh words."""
    kind, plain, harsh = lists
    if rng.random() < 0.1 + 0.7 * quality:
        return rng.choice(kind)
    return rng.choice(plain if rng.random() < 0.35 else harsh)
