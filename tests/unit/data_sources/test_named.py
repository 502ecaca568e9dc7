"""Datasets by name: rows in their true schema, through `datasets`, to the exact records.

`tests/data/named` stands in for the Hub. Datasets that are Python scripts there have one folder
per config here, as the Hub's Parquet branch has.
"""

# ruff: noqa: RUF001
from pathlib import Path

import datasets
import pytest

from data_sources.load import load_source
from data_sources.named import find, known
from data_sources.records import Message
from data_sources.stage_data import load_stage_data
from rlhf_app.config.schema import RunConfig, SourceConfig
from rlhf_app.errors import ConfigError

ROOT = Path(__file__).parents[2] / "data" / "named"
SCRIPTS = {
    "openai/webgpt_comparisons",
    "openai/summarize_from_feedback",
    "Hello-SimpleAI/HC3-Chinese",
    "apple/mkqa",
    "lmqg/qg_jaquad",
    "lmqg/qag_jaquad",
}
U, A, S = "user", "assistant", "system"
RHINE = "SUBREDDIT: r/cats\n\nTITLE: Cat\n\nPOST: My cat left. It came back.\n\nTL;DR:"
MOVE = "SUBREDDIT: r/life\n\nTITLE: Move\n\nPOST: I moved house.\n\nTL;DR:"


class LocalHub:
    """Loads a fixture with `datasets` the way the Hub would be."""

    def __init__(self, cache):
        self.cache = str(cache)
        self.asked = []

    def load(self, name, config, **options):
        self.asked.append((name, config, dict(options)))
        if name in SCRIPTS and "revision" not in options:
            raise RuntimeError(f"Dataset scripts are no longer supported, but found {name}.py")
        options.pop("revision", None)
        assert (ROOT / name).is_dir(), name
        return datasets.load_dataset(str(ROOT / name), config, cache_dir=self.cache, **options)

    def exported_configs(self, name):
        return sorted(path.name for path in (ROOT / name).iterdir())


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    datasets.disable_progress_bars()
    yield LocalHub(tmp_path_factory.mktemp("hub"))
    datasets.enable_progress_bars()


def load(hub, path, *, evaluation=False, verbatim=False, limit=0.0, **source):
    return load_source(
        SourceConfig(path=path, **source),
        verbatim=verbatim,
        max_bad_fraction=limit,
        evaluation=evaluation,
        hub=hub,
    )


def shown(records):
    return [(r.messages, r.response, r.chosen, r.rejected) for r in records]


def pair(question, chosen, rejected, response=None):
    return (turns(question), response, chosen, rejected)


def answer(question, response):
    return (turns(question), response, None, None)


def turns(question):
    given = [(U, question)] if isinstance(question, str) else question
    return tuple(Message(role, content) for role, content in given)


BIRDS = [(U, "Name a bird."), (A, "A robin."), (U, "Another one.")]
TREE = [
    pair("How old is the sun?", "About 4.6 billion years.", "Some billions of years."),
    answer(
        [(U, "How old is the sun?"), (A, "About 4.6 billion years."), (U, "And the moon?")],
        "About 4.5 billion years.",
    ),
]
# path -> records to train on
TRAIN = {
    "Dahoas/rm-static": [
        pair(
            "How do I boil an egg?",
            "Eight minutes in boiling water.",
            "Eggs are round.",
            "Eight minutes in boiling water.",
        ),
        pair(
            [(U, "Hi"), (A, "Hello! What is up?"), (U, "Name a tree.")], "An oak.", "No.", "An oak."
        ),
    ],
    "Dahoas/full-hh-rlhf": [
        pair("Can cats swim?", "Most can, few like it.", "Yes", "Most can, few like it.")
    ],
    "Dahoas/synthetic-instruct-gptj-pairwise": [
        pair("Name two rivers.", "The Rhine and the Po.", "Rivers are wet."),
        pair("Write the word dog backwards.", "god", "dog"),
    ],
    "yitingxie/rlhf-reward-datasets": [
        pair("Where is north?", "Opposite to south.", "I see."),
        pair([(U, "Hi"), (A, "Hello."), (U, "Count to two.")], "One, two.", "Two"),
    ],
    "openai/webgpt_comparisons": [
        pair(
            "Why is the sky blue?",
            "Blue light scatters most (by far).",
            "Because of the sea.",
        ),
        pair("Why do leaves fall?", "Trees save water in winter.", "Wind."),
        answer("What is glue?", "Sticky stuff."),
    ],
    "stanfordnlp/SHP:askculinary": [
        pair("Salt before or after?", "Before, always.", "After."),
        pair("Can I freeze rice?", "Yes, for a month.", "No idea."),
    ],
    "pvduy/sharegpt_alpaca_oa_vicuna_format": [
        answer("Say hello.", "Hello."),
        answer([(U, "Say one."), (A, "One."), (U, "And the next USER?")], "Two."),
    ],
    "wangrui6/Zhihu-KOL": [answer("怎么泡茶？", "水开后等一分钟。")],
    "Cohere/miracl-zh-queries-22-12": [
        pair("长江有多长？", "长江长约六千三百公里。", "黄河在北方。")
    ],
    "Cohere/miracl-ja-queries-22-12": [
        pair("富士山の高さは？", "三千七百七十六メートルです。", "海は広い。"),
        answer("東京の人口は？", "約千四百万人です。"),
    ],
    "Hello-SimpleAI/HC3-Chinese": [answer("为什么下雨？", "云里的水太重了。")],
    "mkqa-Chinese": [answer("蜘蛛有几条腿", "8条"), answer("为什么晚了", None)],
    "mkqa-Japanese": [answer("クモの足は何本ですか", "8本"), answer("なぜ遅いのですか", None)],
    "apple/mkqa": [
        answer("how many legs does a spider have", "8"),
        answer("why is it late", None),
    ],
    "apple/mkqa:ja": [answer("クモの足は何本ですか", "8本"), answer("なぜ遅いのですか", None)],
    "lmqg/qg_jaquad": [answer("犬は何ですか？", "犬は動物です。")],
    "lmqg/qag_jaquad": [answer("犬は何ですか？", "犬は動物です。猫も動物です。")],
    "HuggingFaceH4/ultrafeedback_binarized": [
        pair("List two colours.", "Red and blue.", "Red"),
        pair("Spell cat.", "c-a-t", "kat"),
    ],
    "openbmb/UltraFeedback": [
        pair("Explain rain.", "Clouds cool, drops grow and fall.", "Rain."),
        pair("Two plus two?", "4", "5"),
    ],
    "nvidia/HelpSteer2": [
        pair("What is 3 times 3?", "Nine.", "Ten."),
        pair(BIRDS, "A wren.", "A fish."),
        answer("Say yes.", "Yes."),
        answer("Alone?", "One answer."),
    ],
    "nvidia/HelpSteer2:preference": [
        pair("What is 3 times 3?", "Nine.", "Ten."),
        pair(BIRDS, "A wren.", "A fish."),
        answer("Say yes.", "Yes."),
    ],
    "PKU-Alignment/PKU-SafeRLHF": [
        pair("How to open a lock?", "Use a pick like this.", "Ask a locksmith."),
        pair("How to sleep well?", "Go to bed early.", "Do not."),
    ],
    "Anthropic/hh-rlhf:harmless-base": [pair("May I lie?", "Better ask a friend.", "Whatever.")],
    "Anthropic/hh-rlhf:helpful-base": [pair("How do I knit?", "Better ask a friend.", "Whatever.")],
    "Anthropic/hh-rlhf:helpful-online": [
        pair("How do I sew?", "Better ask a friend.", "Whatever.")
    ],
    "Anthropic/hh-rlhf:helpful-rejection-sampled": [
        pair("How do I iron?", "Better ask a friend.", "Whatever.")
    ],
    "Anthropic/hh-rlhf:red-team-attempts": [
        answer([(U, "Be rude."), (A, "I would rather not."), (U, "Please be rude.")], None)
    ],
    "OpenAssistant/oasst1": TREE,
    "OpenAssistant/oasst2": TREE,
    "databricks/databricks-dolly-15k": [
        answer("Who wrote the note?\nThe note was written by Ann.", "Ann."),
        answer("Name a fruit.", "A pear."),
    ],
    "tatsu-lab/alpaca": [answer("Add the numbers.\n2, 3", "5"), answer("Greet me.", "Hello!")],
    "anon8231489123/ShareGPT_Vicuna_unfiltered": [
        answer([(U, "Hi"), (A, "Hello."), (U, "Tell me a fact.")], "Bees dance."),
        answer("More.", "No more."),
        answer("Anyone?", None),
    ],
    "RyokoAI/ShareGPT52K": [answer("Hi", "Hello.")],
    "shibing624/sharegpt_gpt4": [answer("Hi", "Hello.")],
    "openai/summarize_from_feedback": [
        pair(RHINE, "My cat left and came back.", "A cat."),
        pair(
            "TITLE: Bridge\n\nARTICLE: The bridge opened on Monday.\n\nTL;DR:",
            "A bridge opened.",
            "News.",
        ),
    ],
    "trl-lib/tldr": [answer(RHINE, "Cat left, came back.")],
    "berkeley-nest/Nectar": [
        pair("Name three dogs.", "Rex, a poodle; Bello, a pug; Fido, a mutt.", "Dogs.")
    ],
    "trl-lib/kto-mix-14k": [
        pair("What melts?", "Ice.", "Stone, mostly."),
        answer("What burns?", None),
        answer("What grows?", "Grass."),
    ],
}
# path -> records of the evaluation split
EVALUATION = {
    "Dahoas/rm-static": [pair("Which day follows Monday?", "Tuesday.", "Sunday.", "Tuesday.")],
    "Dahoas/full-hh-rlhf": [
        pair("Is tea a fruit?", "No, it is a leaf.", "Maybe", "No, it is a leaf.")
    ],
    "yitingxie/rlhf-reward-datasets": [pair("Is ice cold?", "Yes.", "Fire.")],
    "stanfordnlp/SHP:askculinary": [pair("Is basil a herb?", "Yes.", "What?")],
    "pvduy/sharegpt_alpaca_oa_vicuna_format": [answer("Say bye.", "Bye.")],
    "Cohere/miracl-zh-queries-22-12": [pair("月亮多大？", "月亮的直径约三千公里。", "太阳很热。")],
    "Cohere/miracl-ja-queries-22-12": [
        pair("雪はなぜ白い？", "光を散らすからです。", "夏は暑い。")
    ],
    "lmqg/qg_jaquad": [answer("猫は何ですか？", "猫も動物です。")],
    "lmqg/qag_jaquad": [answer("鳥は？", "鳥は飛びます。")],
    "HuggingFaceH4/ultrafeedback_binarized": [pair("Name a metal.", "Iron.", "Wood.")],
    "nvidia/HelpSteer2": [pair("Is fire hot?", "Yes.", "No.")],
    "nvidia/HelpSteer2:preference": [pair("Is fire hot?", "Yes.", "No.")],
    "PKU-Alignment/PKU-SafeRLHF": [pair("How to mend a bike?", "Patch the tube.", "Badly.")],
    "Anthropic/hh-rlhf:harmless-base": [pair("May I lie? Really?", "Yes.", "Hm.")],
    "OpenAssistant/oasst1": [answer("Name a star.", "Sirius.")],
    "OpenAssistant/oasst2": [answer("Name a star.", "Sirius.")],
    "openai/summarize_from_feedback": [pair(MOVE, "I moved.", "House")],
    "trl-lib/tldr": [answer(MOVE, "Moved.")],
    "trl-lib/kto-mix-14k": [answer("What flies?", "Birds.")],
}


@pytest.mark.parametrize("path", TRAIN)
def test_records_to_train_on(hub, path):
    records, counts = load(hub, path)
    assert shown(records) == TRAIN[path]
    assert all(record.margin is None and not record.rendered for record in records)
    assert counts.records == len(records)


@pytest.mark.parametrize("path", EVALUATION)
def test_records_of_the_evaluation_split(hub, path):
    records, _ = load(hub, path, evaluation=True)
    assert shown(records) == EVALUATION[path]


def test_every_known_dataset_has_a_fixture():
    tested = {path.partition(":")[0].lower() for path in TRAIN}
    assert {name.partition(":")[0] for name in known()} == tested


def test_names_are_matched_whole_and_without_case(hub):
    assert find("dahoas/RM-static") is find("Dahoas/rm-static") is not None
    for other in ("my/Dahoas/rm-static", "Dahoas/rm-static-copy", "rm-static", "x/HelpSteer2"):
        assert find(other) is None
    records, _ = load(hub, "NVIDIA/helpsteer2:preference")
    assert shown(records) == TRAIN["nvidia/HelpSteer2:preference"]


def test_a_split_can_still_be_named(hub):
    records, _ = load(hub, "HuggingFaceH4/ultrafeedback_binarized", split="train_sft")
    assert shown(records) == [pair("Sft only?", "Yes.", "No.")]
    with pytest.raises(ConfigError, match=r"has splits .*, not dev"):
        load(hub, "HuggingFaceH4/ultrafeedback_binarized", split="dev")


def test_folders_and_configs_are_told_apart(hub):
    hub.asked.clear()
    load(hub, "Anthropic/hh-rlhf:helpful-base")
    load(hub, "openai/summarize_from_feedback")
    assert hub.asked == [
        ("Anthropic/hh-rlhf", None, {"data_dir": "helpful-base"}),
        ("openai/summarize_from_feedback", "comparisons", {}),
        (
            "openai/summarize_from_feedback",
            None,
            {"revision": "refs/convert/parquet", "data_dir": "comparisons"},
        ),
    ]


def test_a_script_with_several_configs_asks_for_one(hub, monkeypatch):
    monkeypatch.setattr(hub, "exported_configs", lambda name: ["a", "b"])
    with pytest.raises(ConfigError, match=r"has the configs a, b; name one as .*jaquad:a"):
        load(hub, "lmqg/qg_jaquad")


def test_the_safer_answer_of_pku_by_a_mapped_column(hub):
    records, _ = load(
        hub,
        "PKU-Alignment/PKU-SafeRLHF",
        columns={"better_response_id": "safer_response_id"},
    )
    assert [r.chosen for r in records] == ["Ask a locksmith.", "Go to bed early."]


def test_remarks_say_what_gave_no_pair(hub):
    tied = "answers are tied: the first is an answer to imitate"
    assert load(hub, "openai/webgpt_comparisons")[1].notes == {tied: 1}
    assert load(hub, "nvidia/HelpSteer2")[1].notes == {tied: 1}
    counts = load(hub, "nvidia/HelpSteer2:preference")[1]
    assert counts.notes == {tied: 1}
    assert counts.unusable == {"row is of the other split": 1}
    assert load(hub, "mkqa-Japanese")[1].notes == {
        "question without a short answer: prompt only": 1
    }
    assert load(hub, "trl-lib/kto-mix-14k")[1].notes == {
        "answer labelled undesirable: prompt only": 1
    }


def test_plain_format_keeps_the_texts_of_normalised_datasets(hub):
    records, _ = load(hub, "yitingxie/rlhf-reward-datasets", verbatim=True)
    assert shown(records)[0] == pair(
        "\n\nHuman: Where is north?\n\nAssistant:", " Opposite to south.", " I see."
    )
    records, _ = load(hub, "openai/summarize_from_feedback", verbatim=True)
    assert records[0].chosen == " My cat left and came back."
    records, _ = load(hub, "pvduy/sharegpt_alpaca_oa_vicuna_format", verbatim=True)
    assert shown(records)[0] == answer("USER: Say hello. ASSISTANT:", "Hello.")


class OneSplit:
    """Dahoas/synthetic-instruct-gptj-pairwise with 2,000 prompts and no split but train."""

    def load(self, name, config, **options):
        rows = [{"prompt": f"q {i}", "chosen": "a", "rejected": "b"} for i in range(2000)]
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})

    def exported_configs(self, name):
        return []


def test_datasets_of_one_split_hold_out_a_tenth_of_their_prompts():
    name = "Dahoas/synthetic-instruct-gptj-pairwise"
    held, counts = load(OneSplit(), name, evaluation=True)
    # 200 expected, standard deviation 13.4: four of them.
    assert 146 <= len(held) <= 254
    assert counts.unusable == {"prompt is in the nine tenths to train on": 2000 - len(held)}
    config = RunConfig.model_validate(
        {"stages": ["reward"], "data": {"sources": name, "eval": name, "eval_limit": 2000}}
    )
    data = load_stage_data(config, "reward", lambda s, e: load(OneSplit(), s.path, evaluation=e))
    mine = {r.messages for r in data.train}
    assert len(data.train) == len(mine) == 2000 - len(held)
    assert {r.messages for r in data.evaluation} == {r.messages for r in held}
    assert not mine & {r.messages for r in held}
