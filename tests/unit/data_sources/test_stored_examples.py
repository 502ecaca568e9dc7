"""Examples in files are those that the plain functions make, and are made once."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from data_sources import encode as encode_module
from data_sources import processes, stored_examples
from data_sources.different_records import each_once
from data_sources.encodings import PairEncoding, PromptEncoding, SFTEncoding
from data_sources.examples import pair_examples, prompt_examples, sft_examples, target_tokens
from data_sources.load import load_source
from data_sources.record_table import ListedRecords
from data_sources.records import Message, Record, TokenIds
from data_sources.selection import Selected
from data_sources.token_files import TokenFiles
from rlhf_app.config.data import DataConfig
from rlhf_app.config.schema import SourceConfig
from rlhf_app.errors import ConfigError
from stages.ppo.text_rows import TextEncoding

WORKER = Path(__file__).with_name("stored_worker.py")
_spec = spec_from_file_location("stored_worker", WORKER)
worker = module_from_spec(_spec)
_spec.loader.exec_module(worker)
FMT = worker.chat_format()
POLICIES = ("drop", "left", "right", "keep_last_turns")
FILES = (
    "docta/orca_dpo_pairs_demo.csv",
    "dschat-extension/reward_with_scores_train.parquet",
    "hh-rlhf/harmless-base-test.jsonl.gz",
    "llamafactory/dpo_en_demo.json",
    "medicalgpt/dpo_zh_500.jsonl",
    "nemo-aligner/dummy-dpo.jsonl",
    "oasst/en_100_tree.jsonl",
    "oasst/oasst1-en-validation.jsonl",
    "rlhf-length-biases/data-00000-of-00001.arrow",
    "torchtune/hh_rlhf_tiny.json",
    "torchtune/stack_exchange_paired_tiny.json",
    "transformers_tasks/rm_sentiment_comments.jsonl",
    "ultrafeedback/eval_clean.jsonl",
)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Encodes into an empty cache, whatever the number of rows."""
    monkeypatch.setattr(encode_module, "SMALL_ROWS", 0)

    def run(records, encoding, workers=1):
        data = DataConfig(cache_dir=str(tmp_path / "cache"), workers=workers)
        return encode_module.encode(records, encoding, data)

    return run


@pytest.fixture
def builds(monkeypatch):
    """How many rows were encoded by each build."""
    found = []
    chunks = stored_examples.encoded_chunks

    def counted(encoding, records, workers):
        found.append(len(records))
        return chunks(encoding, records, workers)

    monkeypatch.setattr(stored_examples, "encoded_chunks", counted)
    return found


def same(examples, expected, reasons):
    assert list(examples) == expected
    assert list(examples.reasons.items()) == list(reasons.items())
    assert len(examples) == len(examples.lengths) == len(expected)
    places = random.Random(1).sample(range(len(expected)), min(5, len(expected)))
    assert [examples[place] for place in places] == [expected[place] for place in places]


@pytest.mark.parametrize("name", FILES)
def test_files_hold_what_the_plain_functions_make(shared_dir, stored, name):
    source = SourceConfig(path=str(shared_dir / "data" / name))
    records = list(load_source(source, verbatim=False, max_bad_fraction=1)[0])[:12]
    random.Random(0).shuffle(records)
    records += records[:4]  # weights repeat rows
    limit = 350  # of bytes: some rows are longer
    for policy in POLICIES:
        expected, reasons = sft_examples(records, FMT, "", limit, truncation=policy)
        found = stored(records, SFTEncoding(FMT, "", limit, policy))
        same(found, expected, reasons)
        assert list(found.lengths) == [len(example.input_ids) for example in expected]
        targets = [target_tokens(example, "response") for example in expected]
        assert [found.targets(i) for i in range(len(found))] == targets
        assert found.highest_id == max((max(e.input_ids) for e in expected), default=0)

        expected, reasons = pair_examples(records, FMT, "", limit, truncation=policy)
        found = stored(records, PairEncoding(FMT, "", limit, policy))
        same(found, expected, reasons)
        longest = [max(len(e.chosen.input_ids), len(e.rejected.input_ids)) for e in expected]
        assert list(found.lengths) == [2 * tokens for tokens in longest]

        expected, reasons = prompt_examples(records, FMT, "", 100, truncation=policy)
        found = stored(records, PromptEncoding(FMT, "", 100, policy))
        same(found, expected, reasons)
        assert list(found.token_rows()) == [example.input_ids for example in expected]


def test_every_turn_and_sampled_ids(stored):
    talk = tuple(map(Message, ("user", "assistant", "user"), ("a", "bcd", "e")))
    ids = TokenIds("mine", prompt=(5, 6), response=(7,), chosen=(7,), rejected=(8, 9))
    records = [
        Record(talk, response="fg", uid="1"),
        Record(talk, response="fg", chosen="fg", rejected="h", uid="2", ids=ids),
    ]
    expected, reasons = sft_examples(records, FMT, "mine", 99, every_turn=True)
    found = stored(records, SFTEncoding(FMT, "mine", 99, "right", "assistant_turns"))
    same(found, expected, reasons)
    assert expected[0].earlier
    assert found.targets(0) == 4 + 3  # bcd; and fg;
    same(
        stored(records, PairEncoding(FMT, "mine", 99, "drop")),
        *pair_examples(records, FMT, "mine", 99),
    )


def test_text_of_many_rows(stored):
    records = [
        Record((Message("user", "abcdefgh"),), uid="1"),
        Record((Message("user", " "),), uid="2"),
        Record((Message("user", "xy"),), uid="3"),
    ]
    found = stored([records[2], *records], TextEncoding(FMT, "", 4, "right", eos_id=1))
    texts = [FMT.tokenizer.decode(ids) for ids, _ in found]
    assert texts == ["<s>xy;", "<s>abc", "cdef", "fgh;", "<s>xy;"]
    assert [found.targets(i) for i in range(5)] == [3, 3, 3, 3, 3]
    assert found.reasons == {"empty text": 1}
    assert found[-1] == found[0] == (found.ids(0), [(1, 4)])
    assert found[1:3] == [found[1], found[2]]
    with pytest.raises(IndexError):
        found[5]


def test_nothing_is_left(stored):
    found = stored(worker.rows(3), SFTEncoding(FMT, "", 2, "drop"))
    assert (len(found), found.highest_id) == (0, 0)
    assert found.reasons == {"row longer than the limit": 3}


def test_each_record_once():
    rows = worker.rows(4)
    picked = [rows[i] for i in (2, 0, 2, 3, 0)]
    identity, once, places = each_once(picked)
    assert len(once) == 3
    assert [once[place] for place in places] == picked
    assert each_once([rows[i] for i in (3, 2, 0)])[0] == identity
    other = [
        replace(rows[0], margin=9.0), replace(rows[0], rendered=True),
        replace(rows[0], response="other"), replace(rows[0], ids=TokenIds("t")),
    ]  # fmt: skip
    assert len(each_once([rows[0], *other])[1]) == 5


class Named(ListedRecords):
    """A table that is known by name, and counts how often it is read."""

    fingerprint = ""

    def __init__(self, records, name):
        super().__init__(records)
        self.fingerprint, self.reads = name, 0

    def _get(self, place):
        self.reads += 1
        return super()._get(place)


def test_tables_that_are_known_by_name_are_not_read_again(stored, builds):
    tables = [Named(worker.rows(30), "a"), Named(worker.rows(60)[30:], "b")]
    order = random.Random(3).choices(range(60), k=50)
    table_N = np.array([place // 30 for place in order], dtype=np.uint16)
    row_N = np.array([place % 30 for place in order], dtype=np.int64)
    picked = Selected(tables, (False, True), table_N, row_N)
    records = list(picked)
    expected = [
        (SFTEncoding(FMT, "", 20, "right"), sft_examples(records, FMT, "", 20)),
        (PairEncoding(FMT, "", 30, "drop"), pair_examples(records, FMT, "", 30)),
        (
            PromptEncoding(FMT, "", 20, "left"),
            prompt_examples(records, FMT, "", 20, truncation="left"),
        ),
    ]
    for encoding, result in expected:
        same(stored(picked, encoding), *result)
    assert builds == [len(set(order))] * 3
    reads = [table.reads for table in tables]
    again = picked.take(np.arange(len(picked))[::-1])
    for encoding, (examples, _) in expected[:2]:
        assert list(stored(again, encoding)) == examples[::-1]
    assert [table.reads for table in tables] == reads
    answers = Selected(tables, (False, False), table_N, row_N)
    stored(answers, expected[0][0])
    stored(
        Selected([tables[0], Named(worker.rows(60)[30:], "c")], (False, True), table_N, row_N),
        expected[0][0],
    )
    assert len(builds) == 5


def test_another_order_finds_the_same_files(stored, builds):
    rows = worker.rows(50)
    encoding = SFTEncoding(FMT, "", 40, "right")
    stored(rows, encoding)
    again = [*reversed(rows), *rows[:9]]
    same(stored(again, encoding), *sft_examples(again, FMT, "", 40))
    assert builds == [50]
    stored(rows[1:], encoding)
    assert builds == [50, 49]


def test_what_decides_the_ids_builds_again(stored, builds, monkeypatch, tmp_path):
    rows = worker.rows(5)
    dotted = worker.chat_format(worker.TEMPLATE.replace("content }};", "content }}.;"))
    encodings = [
        SFTEncoding(FMT, "", 40, "right"),
        SFTEncoding(FMT, "", 39, "right"),
        SFTEncoding(FMT, "", 40, "left"),
        SFTEncoding(FMT, "", 40, "right", "all"),
        SFTEncoding(FMT, "other", 40, "right"),
        SFTEncoding(dotted, "", 40, "right"),
        PairEncoding(FMT, "", 40, "right"),
        PromptEncoding(FMT, "", 40, "right"),
    ]
    found = [list(stored(rows, encoding)) for encoding in encodings]
    assert builds == [5] * len(encodings)
    for encoding, examples in zip(encodings, found, strict=True):
        assert list(stored(rows, encoding)) == examples
    assert builds == [5] * len(encodings)

    code = tmp_path / "code.py"
    code.write_text("1")
    files = stored_examples.code_files
    monkeypatch.setattr(stored_examples, "code_files", lambda kind: [*files(kind), code])
    stored(rows, encodings[0])
    code.write_text("2")
    stored(rows, encodings[0])
    assert builds == [5] * (len(encodings) + 2)


def test_the_code_that_counts():
    names = {path.name for path in stored_examples.code_files(TextEncoding)}
    assert {"encoder.py", "shorten.py", "chat_format.py", "text_rows.py"} <= names


def contents(folder):
    (files,) = [path for path in (folder / "cache" / "tokens").iterdir() if path.is_dir()]
    return {path.name: path.read_bytes() for path in files.iterdir()}


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(stored, monkeypatch, tmp_path, caplog):
    rows = worker.rows(700)
    encoding = SFTEncoding(FMT, "", 40, "right")
    monkeypatch.setattr(stored_examples, "CHUNK_ROWS", 100)
    expected = list(stored(rows, encoding, workers=1))
    alone = contents(tmp_path)
    shutil.rmtree(tmp_path / "cache" / "tokens")
    assert list(stored(rows, encoding, workers=2)) == expected
    assert contents(tmp_path) == alone
    assert "goes on alone" not in caplog.text


def test_where_no_process_can_start_this_one_goes_on(monkeypatch, caplog):
    class Broken:
        def __init__(self, *args, **settings):
            pass

        def submit(self, *args):
            raise processes.BrokenProcessPool("killed")

        def shutdown(self, **settings):
            pass

    monkeypatch.setattr(stored_examples, "CHUNK_ROWS", 10)
    rows, encoding = worker.rows(50), SFTEncoding(FMT, "", 40, "right")
    alone = [c.reasons for c in stored_examples.encoded_chunks(encoding, rows, 1)]
    monkeypatch.setattr(processes, "ProcessPoolExecutor", Broken)
    assert [c.reasons for c in stored_examples.encoded_chunks(encoding, rows, 2)] == alone
    assert len(alone) == 5
    assert "goes on alone: killed" in caplog.text


@pytest.mark.slow
def test_two_processes_at_once_build_once(tmp_path, repo_root):
    variables = os.environ | {"PYTHONPATH": str(repo_root)}
    command = [sys.executable, str(WORKER), str(tmp_path)]
    both = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [json.loads(process.communicate(timeout=120)[0]) for process in both]
    assert sorted(each["encoded"] for each in told) == [0, 1000]
    expected, reasons = sft_examples(worker.rows(1000), FMT, "", 40)
    again = stored_examples.stored_examples(
        worker.rows(1000), SFTEncoding(FMT, "", 40, "right"), tmp_path, 1
    )
    same(again, expected, reasons)
    assert told[0]["told"] == told[1]["told"]


def test_reasons_of_many_rows_are_counted_as_often_as_the_rows_come(stored):
    rows = worker.rows(30)
    picked = [rows[i % 30] for i in random.Random(2).sample(range(90), 60)]
    reasons = stored(picked, SFTEncoding(FMT, "", 20, "right")).reasons
    by_hand = Counter()
    for row in picked:
        by_hand += sft_examples([row], FMT, "", 20)[1]
    assert reasons == by_hand
    assert reasons.total() > 30


def test_a_cache_that_cannot_be_written_is_named(stored, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .*name another directory"):
        stored(worker.rows(2), SFTEncoding(FMT, "", 40, "right"))


def test_damaged_files_are_made_again(stored, builds, tmp_path):
    rows, encoding = worker.rows(20), SFTEncoding(FMT, "", 40, "right")
    expected = list(stored(rows, encoding))
    for damage in (lambda text: text[:-4], lambda text: b""):
        for name in ("packed.bin", "facts.json"):
            (path,) = (tmp_path / "cache" / "tokens").glob(f"sft-*/{name}")
            path.write_bytes(damage(path.read_bytes()))
            assert list(stored(rows, encoding)) == expected
    assert builds == [20] * 5


def test_few_rows_stay_in_memory(tmp_path):
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    found = encode_module.encode(worker.rows(100), SFTEncoding(FMT, "", 40, "right"), data)
    assert list(found) == sft_examples(worker.rows(100), FMT, "", 40)[0]
    assert not (tmp_path / "cache").exists()


def test_files_are_read_again_in_any_place(stored, tmp_path):
    found = stored(worker.rows(40), PairEncoding(FMT, "", 60, "drop"))
    (folder,) = [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir()]
    files = TokenFiles(folder)
    assert files.tokens == sum(
        len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in found
    )
    last = len(files.lengths_I) - 1
    backwards = [files.packed(item) for item in range(last, -1, -1)]
    assert backwards[::-1] == [files.packed(item) for item in range(last + 1)]
