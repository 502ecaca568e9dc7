"""The words of the embedded task. A word belongs to one list, so that gold can tell them apart."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


THINGS = _words(
    "lamp river garden cat dog horse kitchen window bridge boat tower market song story letter "
    "clock road forest mountain lake school train bird tree house door table chair picture coat "
    "cake soup bread apple shoe hat ball drum kite wagon"
)

# (as in "I adore", as in "she adores")
KIND_VERBS = (
    ("love", "loves"),
    ("admire", "admires"),
    ("enjoy", "enjoys"),
    ("cherish", "cherishes"),
    ("adore", "adores"),
    ("praise", "praises"),
)
PLAIN_VERBS = (
    ("see", "sees"),
    ("visit", "visits"),
    ("know", "knows"),
    ("remember", "remembers"),
    ("notice", "notices"),
    ("mention", "mentions"),
)
HARSH_VERBS = (
    ("hate", "hates"),
    ("despise", "despises"),
    ("dislike", "dislikes"),
    ("mock", "mocks"),
    ("dread", "dreads"),
    ("resent", "resents"),
)

KIND_ADJECTIVES = _words(
    "lovely bright gentle warm calm clever brave pretty cheerful graceful tidy charming"
)
PLAIN_ADJECTIVES = _words("old new small large round tall narrow wooden plain quiet")
HARSH_ADJECTIVES = _words(
    "ugly dull cruel nasty stupid dreadful clumsy dirty horrid bitter dreary awful"
)

PEOPLE = _words("sister brother mother father teacher neighbour friend uncle aunt cousin")
TIMES = (
    "every day",
    "in the morning",
    "at night",
    "in spring",
    "after lunch",
    "all year",
    "each week",
    "on Sunday",
)

KIND_WORDS = frozenset(KIND_ADJECTIVES) | {form for verb in KIND_VERBS for form in verb}
HARSH_WORDS = frozenset(HARSH_ADJECTIVES) | {form for verb in HARSH_VERBS for form in verb}
THING_WORDS = frozenset(THINGS)
