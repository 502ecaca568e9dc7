"""Gold scorers for the sentiment tests: VADER's compound score of the answer, and its negative."""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

_ANALYZER = SentimentIntensityAnalyzer()


def positive(prompts: list[str], responses: list[str]) -> list[float]:
    return [_ANALYZER.polarity_scores(response)["compound"] for response in responses]


def negative(prompts: list[str], responses: list[str]) -> list[float]:
    return [-score for score in positive(prompts, responses)]
