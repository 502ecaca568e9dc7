"""Every real file either loads with counts that add up, or is refused in one clear line."""

import gzip
import json

import pytest

from data_sources.load import load_source
from data_sources.stage_data import load_stage_data
from rlhf_app.config.schema import STAGES, DataConfig, RunConfig, SourceConfig
from rlhf_app.errors import ConfigError

# file: shape, rows, records, pairs, answers, unusable rows (counted from the files by hand)
FILES = {
    "docta/orca_dpo_pairs_demo.csv": ("prompt + chosen + rejected", 100, 100, 100, 0, 0),
    "dolly/dolly_sample.jsonl": ("prompt + response", 151, 151, 0, 151, 0),
    "dschat-extension/reward_train.parquet": ("prompt + chosen + rejected", 100, 100, 100, 100, 0),
    "dschat-extension/reward_with_scores_train.parquet": (
        "prompt + chosen + rejected",
        250,
        250,
        250,
        250,
        0,
    ),
    "fastchat/dummy_conversation.json": ("conversations", 500, 500, 0, 500, 0),
    "hh-rlhf/harmless-base-test.jsonl.gz": (
        "chosen + rejected transcripts",
        2312,
        2303,
        2303,
        0,
        9,
    ),
    "llamafactory/dpo_en_demo.json": ("conversations + chosen + rejected", 300, 300, 300, 0, 0),
    "llamafactory/glaive_toolcall_en_demo.json": ("conversations", 300, 300, 0, 300, 0),
    "llamafactory/kto_en_demo.json": ("messages", 300, 300, 0, 150, 0),
    "medicalgpt/dpo_zh_500.jsonl": ("conversations + chosen + rejected", 500, 500, 500, 0, 0),
    "nemo-aligner/dummy-dpo.jsonl": ("prompt + chosen + rejected", 100, 100, 100, 0, 0),
    "nemo-aligner/dummy-sft.jsonl": ("conversations", 30, 30, 0, 30, 0),
    "oasst/en_100_tree.jsonl": ("reply trees", 100, 480, 212, 42, 0),
    "oasst/oasst1-en-validation.jsonl": ("reply tree messages", 2022, 766, 416, 59, 3),
    "rlhf-length-biases/data-00000-of-00001.arrow": ("two scored answers", 200, 200, 200, 0, 0),
    "torchtune/chat_tiny.json": ("conversations", 1, 1, 0, 1, 0),
    "torchtune/hh_rlhf_tiny.json": ("chosen + rejected conversations", 1, 1, 1, 0, 0),
    "torchtune/instruct_tiny.json": ("instruction + output", 2, 2, 0, 2, 0),
    "torchtune/stack_exchange_paired_tiny.json": ("two scored answers", 25, 25, 25, 0, 0),
    "transformers_tasks/rm_sentiment_comments.jsonl": (
        "prompt + chosen + rejected",
        1000,
        1000,
        1000,
        0,
        0,
    ),
    "ultrafeedback/eval_clean.jsonl": ("prompt + chosen + rejected", 200, 200, 200, 0, 0),
    "ultrafeedback/train_clean.jsonl": ("prompt + chosen + rejected", 1000, 998, 998, 0, 2),
}
REFUSED = {"nemo-aligner/test-rm.jsonl": "columns text, label fit no known shape"}


def load(path, **options):
    source = SourceConfig(path=str(path))
    return load_source(source, verbatim=False, max_bad_fraction=0.1, **options)


def test_no_file_is_left_out(shared_dir):
    data = shared_dir / "data"
    found = {str(p.relative_to(data)) for p in data.rglob("*") if p.is_file() and p.suffix}
    assert found == set(FILES) | set(REFUSED)


@pytest.mark.parametrize("name", FILES)
def test_file(shared_dir, name):
    records, counts = load(shared_dir / "data" / name)
    shape, rows, made, pairs, answers, bad = FILES[name]
    assert counts.shape == shape
    assert (counts.read, counts.records, counts.unusable.total()) == (rows, made, bad)
    assert counts.usable == rows - bad
    assert len(records) == made
    assert sum(r.is_pair for r in records) == pairs
    assert sum(r.response is not None for r in records) == answers
    for record in records:
        assert record.messages[-1].role in ("user", "tool")
        assert all(message.content for message in record.messages)
        assert all(text != "" for text in (record.response, record.chosen, record.rejected))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_file(shared_dir, name):
    with pytest.raises(ConfigError, match=REFUSED[name]) as caught:
        load(shared_dir / "data" / name)
    assert "\n" not in str(caught.value)


def test_hh_rows_come_back_when_written_out_again(shared_dir):
    """A second way: transcripts rebuilt from the records equal the file, up to blanks."""
    path = shared_dir / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    records, counts = load(path)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        raw = [json.loads(line) for line in lines]
    assert counts.unusable == {
        "a transcript ends in an empty answer": 4,
        "transcripts part before the last answer": 5,
    }

    def squeeze(text):
        # Neighbouring turns of one role were merged: compare without the second mark.
        words = text.replace("\n\nHuman:", " H:").replace("\n\nAssistant:", " A:").split()
        return " ".join(words)

    names = {"user": "\n\nHuman:", "assistant": "\n\nAssistant:"}

    def written(record, answer):
        turns = "".join(f"{names[m.role]} {m.content}" for m in record.messages)
        return squeeze(f"{turns}\n\nAssistant: {answer}")

    left = {(squeeze(row["chosen"]), squeeze(row["rejected"])) for row in raw}
    equal = sum((written(r, r.chosen), written(r, r.rejected)) in left for r in records)
    assert equal == 2303 - 4  # four rows have two turns of one role in a row


def test_hh_divides_over_the_stages_without_loss(shared_dir):
    source = SourceConfig(path=str(shared_dir / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz"))
    config = RunConfig(data=DataConfig(sources=(source,)))
    total = 0
    for stage in STAGES:
        data = load_stage_data(config, stage)
        part = data.counts.stages[stage]
        assert part.candidates == part.train + part.evaluation + part.dropped.total()
        assert data.counts.sources[0].read == 2312
        total += part.candidates
    assert total == 2303


def test_one_prompt_for_every_row_cannot_be_divided(shared_dir):
    source = SourceConfig(path=str(shared_dir / "data" / "nemo-aligner" / "dummy-dpo.jsonl"))
    config = RunConfig(data=DataConfig(sources=(source,), split="shared"))
    with pytest.raises(ConfigError, match=r"100 rows.*see .*--(data-split|eval-data)"):
        load_stage_data(config, "reward")
