"""Numbers of `rlhf data stats`, worked out by hand or by another library."""

import random
import statistics

import numpy as np
import pytest

from data_sources.records import Message, Record
from data_sources.stats.duplicates import Duplicates
from data_sources.stats.length_bias import LengthBias
from data_sources.stats.lengths import Lengths
from data_sources.stats.scripts import NO_LETTERS, Scripts, main_script


def lengths_of(values):
    lengths = Lengths()
    for value in values:
        lengths.add(value)
    return lengths


def test_percentiles_are_numpys_nearest_ranks():
    rng = random.Random(0)
    for size in (1, 2, 3, 19, 100, 257):
        values = [int(rng.lognormvariate(4, 1)) for _ in range(size)]
        lengths = lengths_of(values)
        for percent in (0, 1, 5, 25, 50, 75, 95, 99, 100):
            expected = np.percentile(values, percent, method="inverted_cdf")
            assert lengths.percentile(percent) == expected
        assert lengths.mean == pytest.approx(statistics.fmean(values))
        assert lengths.above(50) == sum(value > 50 for value in values)


def test_a_histogram_holds_every_text_once_and_a_giant_does_not_flatten_it():
    values = [*range(10, 210), 100_000]
    bins = lengths_of(values).histogram(bins=10)
    assert len(bins) == 10
    for low, high, number in bins:
        assert number == sum(low <= value <= high for value in values)
    assert bins[0] == (10, 29, 20)
    assert bins[-1] == (190, 100_000, 21)
    assert sum(number for _, _, number in bins) == len(values)
    assert lengths_of([7]).histogram() == [(7, 7, 1)]
    assert lengths_of([0, 0, 3]).histogram() == [(0, 0, 2), (1, 1, 0), (2, 2, 0), (3, 3, 1)]
    assert Lengths().histogram() == []
    assert Lengths().as_json() == {"count": 0}


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello, caf\u00e9 123", "Latin"),
        ("\uff28\uff45\uff4c\uff4c\uff4f", "Latin"),  # full width
        ("\u041f\u0440\u0438\u0432\u0435\u0442 you", "Cyrillic"),
        ("\u4f60\u597d\u4e16\u754c ok", "Han"),
        ("\u65e5\u672c\u8a9e\u306e\u6587", "Japanese (kana)"),  # one kana of five
        ("\u4e2d" * 20 + "\u306e", "Han"),  # one of twenty-one
        ("\uc548\ub155", "Hangul"),
        ("\u05e9\u05dc\u05d5\u05dd", "Hebrew"),
        ("\u0645\u0631\u062d\u0628\u0627", "Arabic"),
        ("\u0928\u092e\u0938\u094d\u0924\u0947", "Devanagari"),
        ("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "Thai"),
        ("42 + 1 = \U0001f600", NO_LETTERS),
        ("", NO_LETTERS),
        ("\ue000\U000e0001", NO_LETTERS),  # private use and tags have no name
    ],
)
def test_the_script_of_a_text(text, script):
    assert main_script(text) == script


def test_scripts_are_counted_by_text_and_emoji_apart():
    scripts = Scripts()
    for text in ("one \U0001f600\U0001f600", "two \u2764\ufe0f", "\u0442\u0440\u0438 \u00a9"):
        scripts.add(text)
    assert scripts.texts == {"Latin": 2, "Cyrillic": 1}
    assert scripts.with_emoji == 2


def record(prompt, uid):
    return Record((Message("user", prompt),), response="a", uid=f"{uid:016x}")


def test_duplicates_are_of_the_row_or_of_the_prompt():
    duplicates = Duplicates()
    for prompt, uid in [("Hi  there", 1), ("hi there ", 2), ("Hi  there", 1), ("bye", 3)]:
        duplicates.add(record(prompt, uid))
    assert (duplicates.exact, duplicates.same_prompt, duplicates.prompts) == (1, 1, 2)


def test_the_longer_answer_is_chosen_twice_of_three():
    bias = LengthBias()
    assert bias.longer_share is None
    for chosen, rejected in [(5, 3), (9, 1), (2, 4), (6, 6)]:
        bias.add(chosen, rejected)
    assert bias.as_json() == {
        "pairs": 4,
        "longer_chosen": 2,
        "shorter_chosen": 1,
        "equal_length": 1,
        "longer_share": pytest.approx(2 / 3),
        "mean_chosen": 5.5,
        "mean_rejected": 3.5,
    }
