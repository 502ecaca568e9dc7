"""docs/hybrid_engine.md: its example runs, its tables and commands are the program's."""

import re

import pytest
import torch
import typer

from rlhf_app.cli import app
from rlhf_app.config.schema import HybridEngineSettings


@pytest.fixture
def document(repo_root):
    return (repo_root / "docs" / "hybrid_engine.md").read_text(encoding="utf-8")


def test_the_worked_example_runs_and_generates_what_the_model_computes(document, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, "docs/hybrid_engine.md", "exec"), names)
    missing, none, read, none_again = capsys.readouterr().out.splitlines()
    # What the comments of the example promise.
    assert missing.startswith("attention through transformers' attention interface")
    assert (none, none_again) == ("None", "None")
    assert read == "_local_scalar_dense"
    for prompt, answer in zip([[5, 6, 7], [8]], names["answers"], strict=True):
        ids = list(prompt)
        for _ in range(16):  # the whole row again for every token: no cache, no engine
            with torch.no_grad():
                ids.append(int(names["model"](torch.tensor([ids])).logits[0, -1].argmax()))
        assert answer == ids[len(prompt) :]


def test_the_table_of_keys(document):
    from deepspeed.runtime.config import HybridEngineConfig

    block = document.split("<!-- keys:begin -->")[1].split("<!-- keys:end -->")[0]
    rows = [line.strip("|").split("|") for line in block.strip().splitlines()[2:]]
    found = {cells[0].strip(" `"): [cell.strip() for cell in cells[1:3]] for cells in rows}

    def shown(value: object) -> str:
        return "unset" if value is None else str(value).lower()

    ours, theirs = HybridEngineSettings().model_dump(), HybridEngineConfig().model_dump()
    theirs |= {"compile_decode": "none"}
    assert found == {key: [shown(ours[key]), shown(theirs[key])] for key in ours}


def test_commands_shown_parse(document):
    commands = re.findall(r"`?rlhf verify((?: --?[a-z-]+(?: [\w./=]+)?)*)", document)
    options = {
        option
        for parameter in typer.main.get_command(app).commands["verify"].params
        for option in parameter.opts
    }
    shown = {flag for command in commands for flag in re.findall(r"--[a-z-]+", command)}
    assert {"--model", "--zero-stage", "--lora-rank", "--tp", "--dtype", "--processes"} <= shown
    assert shown <= options


def test_links_lead_to_files(document, repo_root):
    for target in re.findall(r"\]\(([^)#]+)\)", document):
        assert (repo_root / "docs" / target).exists(), target
    for name in re.findall(r"`(\w+\.py)`", document):
        assert (repo_root / "rlhf_app" / "hybrid_engine" / name).is_file(), name
