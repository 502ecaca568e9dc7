"""Scorers for the sentiment tests, from VADER's compound score of the answer."""

import hashlib

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

_ANALYZER = SentimentIntensityAnalyzer()


def positive(prompts: list[str], responses: list[str]) -> list[float]:
    return [_ANALYZER.polarity_scores(response)["compound"] for response in responses]


def negative(prompts: list[str], responses: list[str]) -> list[float]:
    return [-score for score in positive(prompts, responses)]


def varied(prompts: list[str], responses: list[str]) -> list[float]:
    """Positive without repeating itself: times the share of distinct word trigrams."""
    shares = []
    for response in responses:
        words = response.lower().split()
        trigrams = list(zip(words, words[1:], words[2:], strict=False))
        shares.append(len(set(trigrams)) / len(trigrams) if trigrams else 1.0)
    return [a * b for a, b in zip(positive(prompts, responses), shares, strict=True)]


def random(prompts: list[str], responses: list[str]) -> list[float]:
    """Uniform in [-1, 1), the same whenever the same text comes: nothing in it can be learnt."""
    digests = [hashlib.sha256(response.encode()).digest() for response in responses]
    return [int.from_bytes(digest[:4], "big") / 2**31 - 1 for digest in digests]
