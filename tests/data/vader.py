"""Scorers for the sentiment tests: VADER's compound score of the answer, its negative, noise."""

import hashlib

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

_ANALYZER = SentimentIntensityAnalyzer()


def positive(prompts: list[str], responses: list[str]) -> list[float]:
    return [_ANALYZER.polarity_scores(response)["compound"] for response in responses]


def negative(prompts: list[str], responses: list[str]) -> list[float]:
    return [-score for score in positive(prompts, responses)]


def random(prompts: list[str], responses: list[str]) -> list[float]:
    """Uniform in [-1, 1), the same whenever the same text comes: nothing in it can be learnt."""
    digests = [hashlib.sha256(response.encode()).digest() for response in responses]
    return [int.from_bytes(digest[:4], "big") / 2**31 - 1 for digest in digests]
