"""docs/ppo_details.md names settings that exist, with the defaults that they have."""

import re
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from rlhf_app.config.rewards import ONLY_MODEL
from rlhf_app.config.schema import RunConfig

# Settings of stage 3 that only decide how work is cut up, or what is shown and written.
LAYOUT = {
    "updates",
    "rollout_batch_size",
    "micro_batch_size",
    "micro_batch_tokens",
    "score_batch_tokens",
    "max_prompt_length",
    "eval_every",
    "eval_prompts",
    "samples",
    "save_critic",
}


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs" / "ppo_details.md").read_text()


def default(path: str) -> object:
    found: object = RunConfig()
    for part in path.split("."):
        found = getattr(found, part)
    return found


def shown(value: object) -> str:
    if value is None or value == ():
        return "unset"
    if value == ONLY_MODEL:
        return "[model]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_every_default_is_the_schema_s(page):
    found = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)` \(((?:[^()]|\([^()]*\))*)\)", page)
    stated = {path: value.split(":")[0] for path, value in found}
    assert len(stated) >= 40
    assert stated == {path: shown(default(path)) for path in stated}


def test_every_setting_named_exists(page):
    for path in re.findall(r"`((?:ppo|reward|sft|gold|data)\.[a-z_.]+)`", page):
        assert default(path) is not PydanticUndefined, path


def test_every_setting_that_changes_what_is_learned_is_there(page):
    fields = set(type(RunConfig().ppo).model_fields) - LAYOUT
    missing = {name for name in fields if not re.search(rf"`ppo\.{name}\b", page)}
    assert not missing


def test_all_details_are_there_in_order(page):
    assert [int(n) for n in re.findall(r"^\*\*(\d+)\. ", page, re.MULTILINE)] == [*range(1, 30)]
