"""docs/data.md, "Sources and shapes": its examples do what it says, and its table is complete."""

import gzip
import json
import re
from pathlib import Path

import pytest

from data_sources.load import load_source
from data_sources.named import find, known
from data_sources.records import Message
from rlhf_app.config.load import load_config, parse_set
from rlhf_app.config.schema import SourceConfig


@pytest.fixture
def section(repo_root: Path) -> str:
    text = (repo_root / "docs" / "data.md").read_text(encoding="utf-8")
    return re.split(r"^## ", text, flags=re.MULTILINE)[1]


def test_examples(section, tmp_path, monkeypatch, run_cli):
    monkeypatch.chdir(tmp_path)
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL))
    assert set(blocks) == {"json", "python", "yaml", "bash"}
    for language in ("python", "yaml"):
        name = re.match(r"# ([\w.]+)", blocks[language])
        assert name is not None
        Path(name[1]).write_text(blocks[language])
    Path("forum").mkdir()
    other = json.dumps({"title": "Warum?", "language": "de", "answers": []})
    Path("forum/a.jsonl.gz").write_bytes(gzip.compress(f"{blocks['json']}{other}\n".encode()))
    ticket = {"ticket": {"question": "q"}, "replies": [{"text": "r"}, {"text": "s"}]}
    Path("tickets.jsonl").write_text(json.dumps(ticket))
    Path("forum_pairs").mkdir()
    Path("forum_pairs/a.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"p {i}", "chosen": "a", "rejected": "b"}) + "\n"
            for i in range(200)
        )
    )

    actor = parse_set("model.actor=facebook/opt-125m")
    sources = load_config(config_file=Path("sources.yaml"), overrides=[actor]).config.data.sources
    assert [find(source.path) is not None for source in sources] == [True, True, False, False]
    forum, tickets = (
        load_source(source, verbatim=False, max_bad_fraction=0)[0] for source in sources[2:]
    )
    assert [(r.messages[0].content, r.chosen, r.rejected) for r in forum] == [
        ("Why is ice slippery?", "Its surface is almost liquid.", "It is wet.")
    ]
    assert [(r.messages, r.response) for r in tickets] == [((Message("user", "q"),), "r")]
    for line in blocks["bash"].splitlines():
        done = run_cli(*(word.strip("'") for word in line.split()[1:]))
        assert done.returncode == 0, done.stderr


def test_the_table_names_every_known_dataset(section):
    rows = re.findall(r"^\| (`.*?) \| (.+?) \| .+ \|$", section, re.MULTILINE)
    named = {}
    for cells, evaluation in rows:
        for name in re.findall(r"`([^`]+)`", cells):
            if "/" in name or name.startswith("mkqa"):
                base = name.partition(":")[0]
                named[name] = evaluation
            elif name.startswith(":"):
                named[base + name] = evaluation
    for name, evaluation in named.items():
        dataset = find(name)
        assert dataset is not None, name
        if evaluation == "1/10":
            # The red team's folder has no test split of its own.
            assert dataset.evaluates_on_a_share, name
        elif dataset.row_splits is None:
            assert evaluation == dataset.evaluation[0], name
    listed = {name.lower() for name in named}
    languages = {name for name in known() if name.startswith("apple/mkqa:")}
    assert len(languages) == 26
    assert set(known()) - languages <= listed


def test_a_mapped_column_makes_the_safer_answer_the_chosen_one(section, tmp_path):
    columns = re.search(r"`columns: \{(better_response_id): (safer_response_id)\}`", section)
    assert columns is not None
    row = {
        "prompt": "q",
        "response_0": "better",
        "response_1": "safer",
        "better_response_id": 0,
        "safer_response_id": 1,
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    source = SourceConfig(path=str(tmp_path / "a.jsonl"), columns={columns[1]: columns[2]})
    (record,), _ = load_source(source, verbatim=False, max_bad_fraction=0)
    assert record.chosen == "safer"
