"""docs/data.md, "Templates, masks, truncation, blend and split": its examples, tables, numbers."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_sources.stage_data import load_stage_data
from rlhf_app.config.data import BlendConfig, DataConfig, TruncationConfig
from rlhf_app.config.load import load_config, parse_set
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.chat_templates import check_template


@pytest.fixture
def section(repo_root: Path) -> str:
    text = (repo_root / "docs" / "data.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return next(part for part in parts if part.startswith("Templates, masks"))


def blocks(section):
    return dict(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL))


def write(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_example_of_a_blend(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blend.yaml").write_text(blocks(section)["yaml"])
    (tmp_path / "chatml.jinja").write_text(blocks(section)["jinja"])
    write("pairs.jsonl", [{"prompt": f"p {i}", "chosen": "a", "rejected": "b"} for i in range(200)])
    turns = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    write(
        "chats.jsonl",
        [{"messages": [{"role": r, "content": f"{c} {i}"} for r, c in turns]} for i in range(80)],
    )
    write("questions.jsonl", [{"prompt": f"x {i}", "response": "y"} for i in range(90)])
    actor = parse_set("model.actor=some/model")
    config = load_config(config_file=Path("blend.yaml"), overrides=[actor]).config
    check_template(str(config.data.chat_template))
    loaded = {stage: load_stage_data(config, stage) for stage in config.stages}
    found = {
        stage: {r.source for r in (*data.train, *data.evaluation)} for stage, data in loaded.items()
    }
    assert found == {
        "sft": {"pairs.jsonl", "chats.jsonl"},
        "reward": {"pairs.jsonl"},
        "ppo": {"pairs.jsonl", "questions.jsonl"},
    }
    chats = [r for r in loaded["sft"].train if r.source == "chats.jsonl"]
    assert len({r.uid for r in chats}) == len(chats) <= 50
    assert all(r.response is None for r in loaded["ppo"].train if r.source == "questions.jsonl")


def test_the_example_of_a_template(section, tmp_path):
    file = tmp_path / "chatml.jinja"
    file.write_text(blocks(section)["jinja"])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", "</s>", *letters])}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")
    talk = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r")]
    text = (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        "a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    # Without the marks as tokens, as the page says.
    bare = ChatFormat(tokenizer, template_file=str(file)).encode(talk, "b")
    assert tokenizer.decode(bare.ids[bare.response_start :]) == "b</s>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    encoded = ChatFormat(tokenizer, template_file=str(file)).encode(talk, "b", every_turn=True)
    assert tokenizer.decode(encoded.ids) == text
    spans = [*encoded.earlier, (encoded.response_start, len(encoded.ids))]
    assert [tokenizer.decode(encoded.ids[a:b]) for a, b in spans] == ["a<|im_end|>", "b<|im_end|>"]


def test_tables_name_every_choice_and_the_defaults(section):
    def choices(model, field):
        return set(get_args(model.model_fields[field].annotation))

    rows = {name: (default, rest) for name, default, rest in re.findall(
        r"^\| `(\w+)`( \(default\))? \|(.*)\|$", section, re.MULTILINE
    )}  # fmt: skip
    wanted = choices(BlendConfig, "exhaustion") | choices(DataConfig, "sft_loss_on")
    assert set(rows) == wanted | choices(TruncationConfig, "sft")
    marked = {name for name, (default, _) in rows.items() if default}
    assert marked == {BlendConfig().exhaustion, DataConfig().sft_loss_on}
    stages = ("sft", "reward", "ppo")
    for policy in choices(TruncationConfig, "sft"):
        cells = [cell.strip() for cell in rows[policy][1].split("|")][1:]
        found = [stage for stage, cell in zip(stages, cells, strict=True) if cell == "default"]
        assert found == [s for s in stages if getattr(TruncationConfig(), s) == policy]
